"""A `hetero serve` of the benchmark's own: started with given settings, stopped at the end."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hetero.processes import own_command
from hetero.settings import flag_name

START_SECONDS = 600.0
STOP_SECONDS = 30.0
_POLL_SECONDS = 0.05
# What these servers are asked with, whatever keys a hetero.toml has. Not a flag: those all users can see.
KEY = secrets.token_urlsafe(24)


class StartError(Exception):
    """The server did not start: its last line."""


def flags(settings: Mapping[str, Any]) -> list[str]:
    """The command line that gives these settings: by name, as they were given; a list gives several flags.

    Without keys to the API.
    """
    found = [settings["model"]] if settings.get("model") else []
    for name, value in settings.items():
        for each in value if isinstance(value, tuple) else (value,):
            if name not in ("model", "api_key"):
                found += [flag_name(name), str(each)]
    return found


@contextlib.contextmanager
def serving(settings: Mapping[str, Any], log: Path) -> Iterator[str]:
    """The URL of a healthy server, which wants KEY. What it prints goes to `log`. Raises StartError.

    Ctrl-C reaches the server, too: it is in the same group, and stops.
    """
    port = free_port()
    command = [*own_command(), "serve", *flags(settings), "--port", str(port), "--log-level", "warning"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "HETERO_API_KEY": KEY},
        )
        try:
            _wait(process, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not is_healthy(url):
        if process.poll() is not None:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise StartError(lines[-1].removeprefix("hetero: ") if lines else "no output")
        if time.monotonic() > deadline:
            raise StartError(f"not ready after {START_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)


def is_healthy(url: str) -> bool:
    """Whether the server there answers, and can serve."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    """A port of this machine that nobody has at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def measure_kl(model: str, settings: Mapping[str, Any], kv_type: str, tokens: int, ctx: int) -> float:
    """Mean KL divergence of a format of the KV cache against f16, in nats. Raises StartError."""
    import json

    few = {k: v for k, v in settings.items() if k in ("device", "threads")}
    command = [*own_command(), "quality", model, "--kv-type", kv_type, "--json"]
    command += [*flags(few), "--tokens", str(tokens), "--ctx", str(ctx)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    try:
        return float(json.loads(done.stdout)["formats"][0]["kl"]["mean"])
    except (ValueError, LookupError, TypeError):
        raise StartError((done.stderr.strip().splitlines() or ["no output"])[-1]) from None


__all__ = ["KEY", "StartError", "flags", "free_port", "is_healthy", "measure_kl", "serving"]
