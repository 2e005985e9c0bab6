"""Live traffic as a workload without text: GET /recording, for `hetero bench --record`.

A line of JSON for each answer: when its request came, how long prompt and answer were, and names of the
prompt's blocks of 16 tokens. Equal beginnings have equal names within a recording; the names are keyed by a
secret of that recording, so that nobody can try out which text they stand for.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from array import array
from collections.abc import Callable, Sequence

from aiohttp import web

from hetero.request import OutputDelta
from hetero.server.errors import ApiError, bad_field, encode
from hetero.server.settings import ServerSettings
from hetero.server.sse import NDJSON, ClientGone, EventStream

BLOCK_TOKENS = 16
MAX_SECONDS = 7 * 24 * 3600.0
NAME_BYTES = 8
MAX_RECORDINGS = 8  # at a time: each names the blocks of every prompt
IDLE_SECONDS = 5.0  # an empty line after so long finds out whether the client is still there

Ended = Callable[[int, OutputDelta], None]  # choice, its last delta


class _Recording:
    def __init__(self) -> None:
        self.started = time.monotonic()
        self.lines: asyncio.Queue[str] = asyncio.Queue()
        self._secret = secrets.token_bytes(16)

    def names(self, prompt: Sequence[int]) -> list[str]:
        """A name for each whole block, which depends on all tokens up to its end."""
        found, before = [], b""
        for i in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            tokens = array("i", prompt[i : i + BLOCK_TOKENS]).tobytes()
            before = hashlib.blake2b(before + tokens, digest_size=NAME_BYTES, key=self._secret).digest()
            found.append(before.hex())
        return found


class Recorder:
    """Hands what ends to everybody who records. Costs nothing while nobody does."""

    def __init__(self, settings: ServerSettings):
        self._settings = settings
        self._recordings: set[_Recording] = set()

    def watch(self, prompts: Sequence[Sequence[int]], n: int) -> Ended | None:
        """For requests that begin now: what to call with the end of each choice. `n` choices a prompt."""
        if not self._recordings:
            return None
        watching, now = list(self._recordings), time.monotonic()
        named = [(recording, [recording.names(prompt) for prompt in prompts]) for recording in watching]

        def ended(index: int, last: OutputDelta) -> None:
            for recording, names in named:
                line = {
                    "at": round(now - recording.started, 4),
                    "prompt_tokens": len(prompts[index // n]),
                    "output_tokens": max(1, last.num_output_tokens),
                    "blocks": names[index // n],
                }
                recording.lines.put_nowait(encode(line) + "\n")

        return ended

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """?seconds=60: lines as they come, for so long. Needs the key, like all that is not public."""
        try:
            seconds = float(request.query.get("seconds", ""))
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= MAX_SECONDS:
            raise bad_field("seconds", "must be a number of seconds, as in /recording?seconds=60")
        if len(self._recordings) >= MAX_RECORDINGS:
            raise ApiError(
                429, f"there are {MAX_RECORDINGS} recordings already", code="rate_limit_exceeded",
                headers={"Retry-After": "60"},
            )  # fmt: skip
        stream, recording = EventStream(request, self._settings, NDJSON), _Recording()
        self._recordings.add(recording)
        try:
            await stream.start()
            await stream.write("\n")  # so that the client knows that it has begun
            while (left := recording.started + seconds - time.monotonic()) > 0:
                try:
                    async with asyncio.timeout(min(left, IDLE_SECONDS)):
                        line = await recording.lines.get()
                except TimeoutError:
                    line = "\n"
                await stream.write(line)
            await stream.end()
        except (ClientGone, ConnectionError):
            pass
        finally:
            self._recordings.discard(recording)
            stream.close()
        return stream.response
