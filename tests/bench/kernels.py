"""GOP/s of our matmul and of ggml's mul_mat side by side, quantization of the activations included.

make bench-kernels                                            the whole table, about ten minutes
make bench-kernels ARGS="--types Q6_K --threads 1 --json"     a part of it

One token reads each weight once, so a cell of N = 1 also has the share of the memory's bandwidth at which
ours and ggml's best read the weights: where ggml's is at 60 %, no kernel is 1.8 times as fast.

Both run as nodes of a ggml graph on the same OpenMP threads, whose short spin (GOMP_SPINCOUNT, see
backends/ggml/lib.py) leaves no thread of the one running while the other is timed. "repack" is ggml with its
weights in the CPU_REPACK buffer, where a trial in a child process shows that the type works there.
"""

from __future__ import annotations

import argparse
import ctypes as C
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matmul_tools import GgmlMatmul, random_rows

from backends.cpu import matmul
from backends.cpu.features import cpu_level
from backends.cpu.machine import clock, dot_peak, read_bandwidth
from backends.cpu.measure import RepeatedProduct
from backends.ggml.devices import open_device
from backends.ggml.lib import ggml
from backends.ggml.probe import probe
from quant.types import GGML_TYPES, TYPE_IDS

TYPES = "Q4_0,Q4_1,Q4_K,Q5_0,Q5_1,Q5_K,Q6_K,Q8_0,IQ4_XS"
SHAPES = "576x576,1536x576,4096x4096,11008x4096"
TOKENS = "1,2,4,8,16,64,512"
REPACK = "CPU_REPACK"
CACHE_BYTES = 96 << 20  # weights cycle through this much, so that few tokens read memory
MOST_COPIES = 512  # in which the smallest matrix takes as much
OPERATIONS = 1 << 31  # in a timed run, per thread
PATIENCE = 1.5  # seconds after which a cell has been measured often enough


def repack_buffers(types: list[int]) -> dict[int, int]:
    """The CPU_REPACK buffer type of those types that work in it."""
    device = open_device("CPU", 1)
    found = [b for b in device.extra_buffer_types() if ggml().backend_buft_name(b).decode() == REPACK]
    device.close()
    verdicts = probe(types)
    return {t: b for b in found for t in types if (t, REPACK) in verdicts}


def measure(type_id: int, m: int, k: int, n: int, threads: int, repack: int | None, rounds: int):
    """Seconds of one product: (ours, ggml's, ggml's in the CPU_REPACK buffer or None)."""
    raw = random_rows(np.random.default_rng(0), type_id, m, k)
    copies = min(MOST_COPIES, -(-CACHE_BYTES // raw.nbytes)) if n <= 16 else 1
    repeats = max(1, min(MOST_COPIES, OPERATIONS * threads // (2 * m * n * k)))
    copies = min(copies, repeats)
    ours = RepeatedProduct(type_id, m, k, n, threads, copies, repeats)
    theirs = [GgmlMatmul(type_id, raw, m, k, n, threads, copies, repeats)]
    if repack is not None:
        theirs.append(GgmlMatmul(type_id, raw, m, k, n, threads, copies, repeats, repack))
    for each in theirs:
        each.set(np.random.default_rng(1).standard_normal((n, k)).astype(np.float32))
    times = _interleaved([ours.run, *(each.run for each in theirs)], rounds, clock(threads))
    for each in (ours, *theirs):
        each.close()
    return [t / repeats for t in times] + [None] * (2 - len(theirs))


def _interleaved(runs: list[Callable[[], None]], rounds: int, now: Callable[[], float]) -> list[float]:
    """Seconds of the fastest run of each, since other work only adds; the first round does not count.

    They take turns, so that a slow moment of the machine hits all.
    """
    times: list[list[float]] = [[] for _ in runs]
    begin = now()
    for done in range(rounds + 1):
        for run, seconds in zip(runs, times, strict=True):
            start = now()
            run()
            seconds.append(now() - start)
        if done >= 2 and now() - begin > PATIENCE:
            break
    return [min(seconds[1:]) for seconds in times]


def rows(options: argparse.Namespace, threads: int, read_gb_s: float) -> Iterator[dict[str, Any]]:
    """One dictionary for each type, shape and number of tokens that our kernels have."""
    types = [TYPE_IDS[name] for name in options.types.split(",")]
    repack = repack_buffers(types)
    for name, type_id in zip(options.types.split(","), types, strict=True):
        fmt = GGML_TYPES[type_id]
        for shape in options.shapes.split(","):
            m, k = map(int, shape.split("x"))
            if not matmul.supported(type_id, m, k):
                continue
            ours_bytes, ggml_bytes = matmul.packed_nbytes(type_id, m, k), m * k // fmt.elements * fmt.nbytes
            for n in map(int, options.tokens.split(",")):
                times = measure(type_id, m, k, n, threads, repack.get(type_id), options.rounds)
                gops = [2e-9 * m * n * k / t if t else None for t in times]
                best = min(t for t in times[1:] if t)
                yield {
                    "type": name,
                    "shape": shape,
                    "tokens": n,
                    "threads": threads,
                    **dict(zip(("ours", "ggml", "repack"), gops, strict=True)),
                    "ratio": best / times[0],
                    "ours_memory_share": 1e-9 * ours_bytes / times[0] / read_gb_s,
                    "ggml_memory_share": 1e-9 * ggml_bytes / best / read_gb_s,
                }


def cell(row: dict[str, Any]) -> str:
    repack = "" if row["repack"] is None else f" / {row['repack']:.0f}"
    shares = f" ({row['ours_memory_share']:.0%} / {row['ggml_memory_share']:.0%})"
    ratio = f"**{row['ratio']:.1f}**" + (shares if row["tokens"] == 1 else "")
    return f"{row['ours']:.0f} / {row['ggml']:.0f}{repack} = {ratio}"


def print_table(found: list[dict[str, Any]], tokens: list[int]) -> None:
    print("| type | shape | " + " | ".join(f"N = {n}" for n in tokens) + " |")
    print("|---|---|" + "---|" * len(tokens))
    for type_, shape in dict.fromkeys((r["type"], r["shape"]) for r in found):
        line = [cell(r) for r in found if (r["type"], r["shape"]) == (type_, shape)]
        print(f"| {type_} | {shape} | " + " | ".join(line) + " |", flush=True)


@C.CFUNCTYPE(None, C.c_int, C.c_char_p, C.c_void_p)
def _no_log(level: int, text: bytes, user: int) -> None:
    """For ggml, which has a line to say about each repacked tensor."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--shapes", default=SHAPES, help="rows x columns of the weights")
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=7, help="the fastest of so many (default 7)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ggml().log_set(C.cast(_no_log, C.c_void_p), None)
    report: dict[str, Any] = {
        "cpu": binding.get_host_cpu_name(),
        "level": cpu_level(),
        "ggml": f"{ggml().version().decode()} in {ggml().folder}",
        "machine": [],
        "rows": [],
    }
    if not options.json:
        print(f"CPU {report['cpu']}, our kernels: {report['level']}, ggml {report['ggml']}\n")
    for threads in map(int, options.threads.split(",")):
        machine = {
            "threads": threads,
            "dot_peak_gop_s": dot_peak(threads) * 1e-9,
            "read_gb_s": read_bandwidth(threads) * 1e-9,
        }
        found = list(rows(options, threads, machine["read_gb_s"]))
        report["machine"].append(machine)
        report["rows"] += found
        if not options.json:
            print(
                f"{threads} thread(s): dot products at most {machine['dot_peak_gop_s']:.0f} GOP/s, memory "
                f"{machine['read_gb_s']:.1f} GB/s. GOP/s of"
                " ours / ggml / ggml repacked = ours over ggml's best (shares of the memory's bandwidth)\n"
            )
            print_table(found, [int(n) for n in options.tokens.split(",")])
            print()
    if options.json:
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
