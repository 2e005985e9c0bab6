"""GB/s of keys and values that our attention reads in a decode step, against the memory's own.

make bench-attention                                           the table, about half a minute
make bench-attention ARGS="--sequences 1 --context 1024 --json"

Blocks of the paged pools are in random order. Steps take turns over as many layers as more memory than caches
hold needs, and threads share a step's items as they do in a graph.
"""

from __future__ import annotations

import argparse
import json
import threading
from typing import Any

import numpy as np
from llvmlite import binding

from backends.cpu import attention as attend
from backends.cpu.features import cpu_level
from backends.cpu.machine import clock, read_bandwidth
from backends.cpu.step import BLOCK_SIZE, QUERY_ROWS, StepHeader, aligned_empty
from hetero.batch import Batch

SHAPES = {"SmolLM2-135M": (9, 3, 64), "8B": (32, 8, 128)}  # query heads, KV heads, dimension of a head
CACHE_BYTES = 96 << 20
STEPS = 24  # timed ones
ORDINARY = np.float16(0.07)


class Decode:
    """One query token for each of `sequences` requests that have `context` tokens in the pools."""

    def __init__(self, heads: int, kv_heads: int, dim: int, sequences: int, context: int, threads: int):
        self.threads = threads
        blocks = -(-context // BLOCK_SIZE) * sequences
        self.nbytes = 2 * 2 * sequences * context * kv_heads * dim  # of keys and values, read in a step
        self.layers = max(1, -(-CACHE_BYTES // self.nbytes))
        pool_bytes = 2 * blocks * BLOCK_SIZE * kv_heads * dim
        self.pools = aligned_empty(2 * self.layers * pool_bytes)
        rng = np.random.default_rng(0)
        self.pools.view(np.float16)[:] = ORDINARY
        self.header = StepHeader(
            1, [], [], self.layers, max(1, QUERY_ROWS * kv_heads // heads), threads, attend.SCRATCH_BYTES
        )
        self.queries = rng.standard_normal((sequences, heads, dim)).astype(np.float32) * dim**-0.5
        self.out = np.empty_like(self.queries)
        table = rng.permutation(blocks).astype(np.int32).reshape(sequences, -1)
        lengths = np.full(sequences, context, np.int32)
        slots = (table[:, -1] * BLOCK_SIZE + (context - 1) % BLOCK_SIZE).astype(np.int32)
        each = np.arange(sequences + 1, dtype=np.int32)
        self.batch = Batch(
            0, np.zeros(sequences, np.int32), lengths - 1, [slots], [table], lengths, each, each[:-1], []
        )
        self.parameters = np.zeros((self.layers, attend.NUM_PARAMS), np.int64)
        for layer, p in enumerate(self.parameters):
            p[attend.P_HEADER], p[attend.P_HEADS], p[attend.P_KV_HEADS] = self.header.address, heads, kv_heads
            p[attend.P_DIM_K] = p[attend.P_DIM_V] = dim
            p[attend.P_KEY_POOL] = self.pools.ctypes.data + 2 * layer * pool_bytes
            p[attend.P_VALUE_POOL] = p[attend.P_KEY_POOL] + pool_bytes
            p[attend.P_COUNTER] = self.header.counter_address(layer)

    def seconds(self) -> float:
        """Of the fastest step, in a layer whose keys and values the caches no longer have."""
        best, now = float("inf"), clock(self.threads)
        for step in range(STEPS + 1):
            if step % self.layers == 0:
                self.header.set(self.batch)
            start = now()
            others = [threading.Thread(target=self._share, args=(step, i)) for i in range(1, self.threads)]
            for thread in others:
                thread.start()
            self._share(step, 0)
            for thread in others:
                thread.join()
            if step > 0:  # the first compiles
                best = min(best, now() - start)
        assert np.isfinite(self.out).all()
        return best

    def _share(self, step: int, ith: int) -> None:
        parameters = self.parameters[step % self.layers].ctypes.data
        rows = np.int64(len(self.queries))
        attend.attend_share(parameters, self.queries.ctypes.data, self.out.ctypes.data, rows, np.int64(ith))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096, help="tokens of each sequence")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, (heads, kv_heads, dim) in SHAPES.items():
        for threads in map(int, options.threads.split(",")):
            memory = read_bandwidth(threads) * 1e-9
            decode = Decode(heads, kv_heads, dim, options.sequences, options.context, threads)
            seconds = decode.seconds()
            read = decode.nbytes / seconds * 1e-9
            rows.append(
                {
                    "heads": f"{name}: {heads} / {kv_heads} x {dim}",
                    "threads": threads,
                    "milliseconds": seconds * 1e3,
                    "gb_s": read,
                    "memory_gb_s": memory,
                    "share": read / memory,
                }
            )
    report = {
        "cpu": binding.get_host_cpu_name(),
        "level": cpu_level(),
        "sequences": options.sequences,
        "context": options.context,
        "rows": rows,
    }
    if options.json:
        print(json.dumps(report, indent=1))
        return
    print(
        f"CPU {report['cpu']}, {report['level']}: a decode step of {options.sequences} sequences at"
        f" {options.context} tokens, f16\n"
    )
    print("| heads / KV heads x dimension | threads | ms | K and V read, GB/s | memory, GB/s | share |")
    print("|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r['heads']} | {r['threads']} | {r['milliseconds']:.2f} | {r['gb_s']:.1f} |"
            f" {r['memory_gb_s']:.1f} | {r['share']:.0%} |"
        )


if __name__ == "__main__":
    main()
