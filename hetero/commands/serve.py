"""`hetero serve`: bind the port, load the model, show the start screen, serve until a signal comes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hetero.commands.inspect import fail, print_table
from hetero.commands.signals import Terminated, ending_on_sigterm
from hetero.config import Loaded, describe
from hetero.files import unreadable
from hetero.screen import Placement, StartScreen, loading, show_start
from hetero.settings import Settings

if TYPE_CHECKING:
    from hetero.async_engine import AsyncEngine
    from hetero.prepare import Prepared


EVERY_ADDRESS = ("0.0.0.0", "::", "")


class PortError(Exception):
    """The address cannot be listened on: one line."""


def print_config(loaded: Loaded) -> int:
    """Each setting, its value and its source; secrets are masked."""
    print_table(("setting", "value", "source"), describe(loaded))
    return 0


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or Ctrl-C. Exit code 1, and one line, when that cannot begin."""
    from hetero.launch import load
    from hetero.prepare import LaunchError, prepare, require_fit
    from hetero.server.request_id import AddRequestId, OneLine

    started = time.monotonic()
    logging.basicConfig(level=settings.log_level.upper())
    for handler in logging.getLogger().handlers:
        handler.setFormatter(OneLine("%(levelname)s %(name)s: %(message)s"))
        handler.addFilter(AddRequestId())
    if settings.log_level != "debug":  # a line for each request helps nobody
        logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    try:
        keys, tls = api_keys(settings), tls_context(settings)
        require_trace(settings)
        with contextlib.ExitStack() as held:  # the port, so that nobody takes it while the model loads
            for sock in bind(settings.host, settings.port):
                held.enter_context(sock)
            with ending_on_sigterm(), loading() as progress:
                prepared = prepare(settings, progress)
                require_fit(prepared)
                engine, placements = load(prepared, settings, progress)
                try:
                    trace_requests(engine, settings)
                except LaunchError:
                    asyncio.run(engine.close())  # its threads would keep the process
                    raise

        def show(host: str, port: int) -> None:
            show_start(_start_screen(settings, prepared, engine, placements, keys, started))

        asyncio.run(_serve(engine, settings, keys, tls, show))
    except (PortError, LaunchError) as exc:
        return fail(exc)
    except Terminated:
        return 0
    except KeyboardInterrupt:  # while loading; later the server drains
        return 1
    return 0


async def _serve(
    engine: AsyncEngine,
    settings: Settings,
    keys: tuple[str, ...],
    tls: ssl.SSLContext | None,
    show: Callable[[str, int], None],
) -> None:
    from hetero.server import app
    from hetero.server.settings import ServerSettings

    http = ServerSettings(
        host=settings.host,
        port=settings.port,
        api_keys=keys,
        key_requests=settings.key_requests,
        yield_only=settings.priority == "yield",
        tls=tls,
        allowed_hosts=settings.allowed_host,
        allowed_origins=settings.allowed_origin,
        max_body_bytes=settings.max_body,
    )
    engine.start()
    try:
        await app.serve(app.create_app(engine, http), http, on_ready=show)
    except OSError as exc:
        raise _port_error(settings.host, settings.port, exc, "--port") from None
    finally:
        await engine.close(0)


def _start_screen(
    settings: Settings,
    prepared: Prepared,
    engine: AsyncEngine,
    placements: tuple[Placement, ...],
    keys: tuple[str, ...],
    started: float,
) -> StartScreen:
    info, tls = engine.info, settings.tls_cert is not None
    every = settings.host in EVERY_ADDRESS
    return StartScreen(
        model=info.name,
        family=info.architecture,
        n_params=info.n_params,
        size_bytes=info.size_bytes,
        quantization=info.quantization,
        max_model_len=info.n_ctx,
        kv_tokens=info.kv_tokens,
        ram_tokens=prepared.host.tokens,
        max_num_seqs=settings.max_num_seqs,
        placements=placements,
        url=base_url(settings.host, settings.port, tls),
        url_elsewhere=base_url(socket.gethostname(), settings.port, tls) if every else "",
        start_seconds=time.monotonic() - started,
        needs_key=bool(keys),
        open_to_network=not is_loopback(settings.host),
        notes=prepared.plan.notes,
    )


def base_url(host: str, port: int, tls: bool = False) -> str:
    """Where a client on this machine finds the server."""
    scheme = "https" if tls else "http"
    if host in EVERY_ADDRESS:
        host = "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address that is listened on."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def api_keys(settings: Settings) -> tuple[str, ...]:
    """Keys of --api-key and of --api-key-file, one a line. LaunchError when the file gives none."""
    from hetero.prepare import LaunchError

    if settings.api_key_file is None:
        return settings.api_key
    try:
        text = Path(settings.api_key_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise LaunchError(f"--api-key-file {settings.api_key_file}: {unreadable(exc)}") from None
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:  # an empty file must not mean "no key is needed"
        raise LaunchError(f"--api-key-file {settings.api_key_file}: there is no key in it")
    return (*settings.api_key, *keys)


def require_trace(settings: Settings) -> None:
    """Raise LaunchError when the file of --trace cannot be written, before the model loads."""
    from hetero.prepare import LaunchError

    if settings.trace is None:
        return
    try:
        Path(settings.trace).open("a", encoding="utf-8").close()
    except OSError as exc:
        raise LaunchError(f"--trace {settings.trace}: {exc.strerror or exc}") from None


def trace_requests(engine: AsyncEngine, settings: Settings) -> None:
    """Do what --trace and --otlp say. Raises LaunchError when that cannot be done."""
    from hetero.prepare import LaunchError
    from hetero.trace.chrome import ChromeFile
    from hetero.trace.otlp import OtlpError, OtlpExporter
    from hetero.trace.tracer import Sink, Tracer

    sinks: list[Sink] = []
    try:
        if settings.trace is not None:
            sinks.append(ChromeFile(Path(settings.trace), engine.depth))
        if settings.otlp is not None:
            sinks.append(OtlpExporter(settings.otlp, engine.info.name))
    except OSError as exc:
        raise LaunchError(f"--trace {settings.trace}: {exc.strerror or exc}") from None
    except OtlpError as exc:
        raise LaunchError(str(exc)) from None
    if sinks:
        engine.trace_with(Tracer(sinks))


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """What --tls-cert and --tls-key say; None without them. LaunchError when they cannot be used."""
    from hetero.prepare import LaunchError

    if settings.tls_cert is None or settings.tls_key is None:
        return None
    for name, path in (("--tls-cert", settings.tls_cert), ("--tls-key", settings.tls_key)):
        try:
            Path(path).read_bytes()
        except OSError as exc:
            raise LaunchError(f"{name} {path}: {exc.strerror or exc}") from None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # A password that would be asked for on the terminal is refused instead.
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except (ssl.SSLError, ValueError) as exc:
        reason = getattr(exc, "reason", None) or exc
        raise LaunchError(
            f"--tls-cert {settings.tls_cert}, --tls-key {settings.tls_key}: no certificate and key that "
            f"belong together ({reason})"
        ) from None
    return context


def bind(host: str, port: int, host_flag: str = "--host", port_flag: str = "--port") -> list[socket.socket]:
    """Sockets bound to all addresses of `host`, not yet listening. Raises PortError, naming the flags.

    Held from before the model loads, so that nobody can take the port meanwhile.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise PortError(f"{host_flag} {host}: no such address") from None
    sockets: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(infos):
        sock = socket.socket(family, kind, protocol)
        sockets.append(sock)
        try:
            if os.name == "posix":  # elsewhere it would let two programs share the port
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
        except OSError as exc:
            for opened in sockets:
                opened.close()
            raise _port_error(host, port, exc, port_flag) from None
    return sockets


def _port_error(host: str, port: int, exc: OSError, port_flag: str) -> PortError:
    taken = exc.errno == errno.EADDRINUSE
    reason = "is taken by another program" if taken else exc.strerror or exc
    return PortError(f"port {port} on {host}: {reason}; choose another with {port_flag}")
