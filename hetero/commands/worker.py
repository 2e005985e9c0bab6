"""`hetero worker`: listen, and serve this machine's devices to a server on another one."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.commands.inspect import fail
from hetero.commands.serve import PortError, bind, is_loopback
from hetero.sizes import format_size


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says. `cache_size` in bytes, `threads` 0: one per usable core."""

    listen: str
    devices: tuple[str, ...]
    threads: int
    secret_file: Path | None
    trusted_network: bool
    cache_dir: Path | None
    cache_size: int
    log_level: str
    as_json: bool


def worker(options: Options) -> int:
    """Serve until SIGTERM or Ctrl-C. Exit code 1, and one line, when that cannot begin."""
    from hetero.pipeline import session
    from hetero.plan.devices import usable_cores
    from hetero.prepare import LaunchError, list_devices
    from hetero.worker.secret import SecretError, find_secret
    from hetero.worker.server import Worker

    logging.basicConfig(level=options.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        host, port = split_address(options.listen)
        _require_trust(host, port, options.trusted_network)
        sockets = bind(host, port, "--listen", "--listen")
        secret = find_secret(options.secret_file, create=True)
        found = list_devices()
        names = _offered(options.devices, [d.name for d in found])
        cache = options.cache_dir or default_cache()
        _require_writable(cache)
    except (PortError, LaunchError, SecretError, ValueError) as exc:
        return fail(exc)
    kinds = {d.name: d.kind for d in found}
    passed: dict[str, Any] = {
        "devices": names,
        "threads": options.threads or usable_cores(),
        "cache": str(cache),
        "cache_size": options.cache_size,
        "log_level": options.log_level.upper(),
    }
    # two programs with a thread on each core wait for each other all the time; a GPU can be shared
    serving = Worker(sockets, secret, session.run, passed, exclusive=lambda name: kinds[name] == "cpu")
    stop = _stop_signal()
    serving.start()
    _show(options, sockets, names, secret.source, cache)
    while not stop.wait(0.5 if sys.platform == "win32" else 3600):  # there, waiting is deaf to signals
        pass
    serving.close()
    return 0


def split_address(text: str) -> tuple[str, int]:
    """("127.0.0.1", 8090) of "127.0.0.1:8090", also of "[::1]:8090". ValueError naming --listen."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--listen {text}: must be ADDR:PORT, such as 127.0.0.1:8090")
    return host.removeprefix("[").removesuffix("]"), int(port)


def default_cache() -> Path:
    """Where the layers that servers have sent are kept."""
    import platformdirs

    base = os.environ.get("HETERO_CACHE_DIR") or platformdirs.user_cache_dir("hetero")
    return Path(base).expanduser() / "worker"


def _require_trust(host: str, port: int, trusted: bool) -> None:
    if is_loopback(host) or trusted:
        return
    raise ValueError(
        f"--listen {host}:{port}: other machines would reach this worker. Servers must prove the secret and "
        "nobody can change what they send, but it is not encrypted: who taps the network reads the weights "
        "and, in effect, the prompts. Over a network that is not yours alone, listen on 127.0.0.1 and run on "
        f"the server's machine: ssh -N -L {port}:127.0.0.1:{port} THIS-MACHINE; on one that is, add "
        "--trusted-network"
    )


def _require_writable(cache: Path) -> None:
    """ValueError naming --cache-dir when nothing can be kept there: no server could use the worker."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as exc:
        reason = "is not a folder" if isinstance(exc, FileExistsError) else exc.strerror or exc
        raise ValueError(f"--cache-dir {cache}: {reason}") from None


def _offered(requested: tuple[str, ...], names: list[str]) -> list[str]:
    """The devices to offer, by their names. ValueError for one that is not there."""
    known = {name.lower(): name for name in names}
    for name in requested:
        if name.lower() not in known:
            raise ValueError(f"--device {name}: no such device; there is {', '.join(names)}")
    return list(dict.fromkeys(known[name.lower()] for name in requested)) or names


def _show(options: Options, sockets: list[socket.socket], names: list[str], secret: str, cache: Path) -> None:
    addresses = [sock.getsockname()[:2] for sock in sockets]
    shown = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in addresses]
    if options.as_json:
        facts = {"listening": shown, "devices": names, "secret": secret, "cache": str(cache)}
        print(json.dumps(facts), flush=True)
        return
    print(f"listening  {', '.join(shown)}")
    print(f"devices    {', '.join(names)}")
    print(f"secret     {secret}")
    print(f"cache      {cache}, at most {format_size(options.cache_size)}")
    print(f"use it     hetero serve --device worker={shown[0]}", flush=True)


def _stop_signal() -> threading.Event:
    """Set at SIGTERM or Ctrl-C."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop
