"""ggml's RPC server in a process of its own, which tests may stop, kill and start again."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def serve(endpoint: str, core: int | None = None) -> None:
    """Run in the server's process: the CPU, one thread, perhaps on one core, until it is killed."""
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core]})
    from backends.ggml.lib import STR, P, ggml

    lib = ggml()
    registries = [lib.backend_reg_get(i) for i in range(lib.backend_reg_count())]
    (rpc,) = [r for r in registries if lib.backend_reg_name(r) == b"RPC"]
    address = lib.backend_reg_get_proc_address(rpc, b"ggml_backend_rpc_start_server")
    prototype = ctypes.CFUNCTYPE(None, STR, STR, ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(P))
    prototype(address)(endpoint.encode(), None, 1, 1, (P * 1)(lib.backend_dev_get(0)))


def has_rpc() -> bool:
    """Whether the ggml that is used has the RPC device."""
    from backends.ggml.lib import ggml

    lib = ggml()
    return any(lib.backend_reg_name(lib.backend_reg_get(i)) == b"RPC" for i in range(lib.backend_reg_count()))


class RpcServer:
    """At a port of its own, which it keeps over restarts."""

    def __init__(self) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.endpoint = f"127.0.0.1:{sock.getsockname()[1]}"
        self.start()

    def start(self) -> None:
        code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests' / 'device')!r}]; "
        code += f"import rpc_tools; rpc_tools.serve({self.endpoint!r})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        host, port = self.endpoint.split(":")
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection((host, int(port)), 1.0).close()
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()
