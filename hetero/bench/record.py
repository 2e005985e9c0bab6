"""Traffic of a running server as a workload: lengths, times, beginnings in common, and no text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import aiohttp

from hetero.bench.server_info import ServerError
from hetero.files import write_whole

LINE_BYTES = 1 << 24  # a line has 20 for each 16 tokens of a prompt


async def record(
    url: str, api_key: str | None, seconds: float, path: Path, progress: Callable[[int], None]
) -> int:
    """Write what ends within `seconds` to `path`, in order of arrival. The number of requests.

    What was recorded until the connection broke, or Ctrl-C came, is written too. Raises ServerError where
    the server does not record.
    """
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    lines: list[str] = []
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=15, sock_read=60)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout, read_bufsize=LINE_BYTES) as session,
            session.get(f"{base}/recording", params={"seconds": str(seconds)}) as answer,
        ):
            if answer.status != 200:
                hint = "; --api-key sets the key" if answer.status == 401 else ", which only hetero has"
                raise ServerError(f"{base}/recording: HTTP {answer.status}{hint}")
            async for line in answer.content:
                if line.strip():
                    lines.append(line.decode())
                    progress(len(lines))
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        if not lines:
            raise ServerError(f"{base}/recording: {error or type(error).__name__}") from None
    except asyncio.CancelledError:
        pass
    lines.sort(key=lambda line: json.loads(line)["at"])
    write_whole(path, "".join(lines))
    return len(lines)
