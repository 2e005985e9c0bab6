"""GB/s of keys and values that our attention reads in a decode step, against the memory's own.

make bench-attention                                           the table, about half a minute
make bench-attention ARGS="--sequences 1 --context 1024 --json"
make bench-attention ARGS="--kv-type f16,fp8,q8_0-f16"         formats side by side; K-V: keys, values apart

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
from backends.cpu.attention_pools import compiled_scores, compiled_values
from backends.cpu.features import cpu_level
from backends.cpu.kv_codes import FORMATS, part_bytes
from backends.cpu.machine import clock, read_bandwidth
from backends.cpu.step import BLOCK_SIZE, QUERY_ROWS, StepHeader, aligned_empty
from hetero.batch import Batch

SHAPES = {"SmolLM2-135M": (9, 3, 64), "8B": (32, 8, 128)}  # query heads, KV heads, dimension of a head
CACHE_BYTES = 96 << 20
STEPS = 24  # timed ones
ORDINARY = np.float16(0.07)


class Decode:
    """One query token for each of `sequences` requests that have `context` tokens in the pools."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        kv_types: tuple[str, str],
        sequences: int,
        context: int,
        threads: int,
    ):
        heads, kv_heads, dim = shape
        self.threads = threads
        blocks = -(-context // BLOCK_SIZE) * sequences
        parts = [part_bytes(t, dim) for t in kv_types]
        self.nbytes = sum(blocks * kv_heads * part for part in parts)  # of keys and values, read in a step
        self.layers = max(1, -(-CACHE_BYTES // self.nbytes))
        self.pools = aligned_empty(self.layers * self.nbytes)
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
            p[attend.P_KEY_POOL] = self.pools.ctypes.data + layer * self.nbytes
            p[attend.P_VALUE_POOL] = p[attend.P_KEY_POOL] + blocks * kv_heads * parts[0]
            p[attend.P_KEY_BYTES], p[attend.P_VALUE_BYTES] = parts
            p[attend.P_SCORES] = compiled_scores(FORMATS[kv_types[0]]).address
            p[attend.P_VALUES] = compiled_values(FORMATS[kv_types[1]]).address
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
    parser.add_argument("--kv-type", default="f16", help="with commas: several; k-v: keys and values apart")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, shape in SHAPES.items():
        for threads in map(int, options.threads.split(",")):
            memory = read_bandwidth(threads) * 1e-9
            for kv_type in options.kv_type.split(","):
                key_type, _, value_type = kv_type.partition("-")
                kv_types = (key_type, value_type or key_type)
                decode = Decode(shape, kv_types, options.sequences, options.context, threads)
                seconds = decode.seconds()
                read = decode.nbytes / seconds * 1e-9
                rows.append(
                    {
                        "heads": "{}: {} / {} x {}".format(name, *shape),
                        "threads": threads,
                        "kv_type": kv_type,
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
        f" {options.context} tokens\n"
    )
    print("| heads / KV heads x dimension | threads | KV | ms | K and V read, GB/s | memory, GB/s | share |")
    print("|---|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r['heads']} | {r['threads']} | {r['kv_type']} | {r['milliseconds']:.2f} | {r['gb_s']:.1f} |"
            f" {r['memory_gb_s']:.1f} | {r['share']:.0%} |"
        )


if __name__ == "__main__":
    main()
