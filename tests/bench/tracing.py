"""What `--trace` costs: two servers, one of them traced, asked the same in turn.

    python tests/bench/tracing.py --clients 8 --repeat 12

Prints tokens per second and CPU time per token as traced / not traced, the median of the rounds with the
least and the greatest. Both run on the same cores, one at a time; the smaller the model, the more it costs.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from servers import Server, free_port, hetero_command, running

from hetero import __version__
from hetero.bench.client import Target
from hetero.bench.distributions import Lengths
from hetero.bench.load import Load, run_load
from hetero.bench.server_info import find_out
from hetero.bench.workload import WORKLOADS, Sizes
from hetero.models import resolve
from hetero.plan.devices import usable_cores

SIZES = Sizes(Lengths("fixed", 100), Lengths("fixed", 120))


@contextmanager
def served(args: argparse.Namespace, folder: Path, *flags: str) -> Iterator[tuple[Target, psutil.Process]]:
    """A server with further flags, and its process."""
    port = free_port()
    command = [*hetero_command(args.model, args.threads, port), *flags]
    with running("hetero", command, port, folder / f"{port}.log", __version__) as server:
        yield target_of(server), process_at(port)


def target_of(server: Server) -> Target:
    return asyncio.run(find_out(server.base, server.name, None, None, None, True, 0.0)).target


def process_at(port: int) -> psutil.Process:
    """The child that listens on a port."""
    for child in psutil.Process().children():
        if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in child.net_connections()):
            return child
    raise SystemExit(f"nothing listens on port {port}")


def measured(
    target: Target, process: psutil.Process, args: argparse.Namespace, seed: int
) -> tuple[float, float]:
    """Output tokens per second, CPU seconds per output token."""
    sessions = WORKLOADS["chat"].sessions(seed, args.sessions * args.clients, SIZES)
    before = process.cpu_times()
    run = run_load(target, sessions, Load(concurrency=args.clients), seed)
    after = process.cpu_times()
    if failed := [r.error for r in run.records if r.error]:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    tokens = sum(r.output_tokens for r in run.records)
    cpu = after.user + after.system - before.user - before.system
    return tokens / run.seconds, cpu / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="default: the packaged model")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--sessions", type=int, default=4, help="requests of each client in a round")
    parser.add_argument("--repeat", type=int, default=12, help="rounds")
    args = parser.parse_args()
    args.model = args.model or resolve(None).path
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trace = folder / "trace.json"
        traced = stack.enter_context(served(args, folder, "--trace", str(trace)))
        plain = stack.enter_context(served(args, folder))
        ratios = []
        for seed in range(-1, args.repeat):
            first, second = (traced, plain) if seed % 2 else (plain, traced)
            found = {server[0].url: measured(*server, args, seed) for server in (first, second)}
            pair = [a / b for a, b in zip(found[traced[0].url], found[plain[0].url], strict=True)]
            if seed >= 0:  # the first round warms up
                ratios.append(pair)
        size = trace.stat().st_size
    for name, column in zip(("tokens/s", "CPU time per token"), zip(*ratios, strict=True), strict=True):
        print(
            f"{name}, traced / not traced: {statistics.median(column):.3f}x "
            f"({min(column):.3f} to {max(column):.3f}, {len(column)} rounds)"
        )
    print(f"{size / 2**20:.1f} MiB of trace")


if __name__ == "__main__":
    main()
