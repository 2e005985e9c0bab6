"""GOP/s of our matmul and of ggml's mul_mat, side by side, activations quantized in both.

python tests/bench/kernels.py --types Q4_1,Q6_K --shapes 576x576,4096x4096 --tokens 1,8,64,512 --threads 1
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from pathlib import Path

import numpy as np
from numba import njit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matmul_tools import GgmlMatmul, OurMatmul, aligned, random_rows

from backends.cpu import matmul
from backends.cpu.features import cpu_level
from backends.cpu.matmul import FORMATS
from backends.cpu.simd import call_address

IDS = {f.name: f.type_id for f in FORMATS.values()}
CACHE_BYTES = 48 << 20  # weights cycle through at least this much, so that decode reads memory
SPIN_SECONDS = 0.2  # ggml's threads spin that long for their next graph and would take ours' cores
OPERATIONS = 1 << 31  # in a timed run, per thread


@njit(nogil=True)
def _repeat(kind, multiply, repeats, copies, step, packed, m, k, x, activations, n, y, scratch, ith, nth):
    for i in range(repeats):
        matmul.quantize_activations(kind, x, 4 * k, n, k, activations, ith, nth)
        call_address(
            multiply, (packed + (i % copies) * step, m, k, activations, n, y, 4 * m, scratch, ith, nth)
        )


class Ours:
    """The repeated product on some threads, which do not wait for each other."""

    def __init__(self, one: OurMatmul, x: np.ndarray, threads: int, copies: int, repeats: int) -> None:
        n, m, k, step = len(x), one.m, one.k, one.packed.nbytes
        kind = matmul.activation_kind(one.type_id)
        self.packed = aligned(step * copies)
        self.packed.reshape(copies, step)[:] = one.packed
        self.buffers = [
            x,
            aligned(matmul.activation_nbytes(kind, n, k)),
            aligned(4 * n * m),
            aligned(matmul.SCRATCH_BYTES * threads),
        ]
        source, activations, y, scratch = (b.ctypes.data for b in self.buffers)
        self.arguments = (
            kind,
            matmul.compiled_matmul(one.type_id).address,
            repeats,
            copies,
            step,
            self.packed.ctypes.data,
            m,
            k,
            source,
            activations,
            n,
            y,
            scratch,
        )
        self.threads = threads

    def run(self) -> None:
        others = [
            threading.Thread(target=_repeat, args=(*self.arguments, i, self.threads))
            for i in range(1, self.threads)
        ]
        for thread in others:
            thread.start()
        _repeat(*self.arguments, 0, self.threads)
        for thread in others:
            thread.join()


def measure(type_id: int, m: int, k: int, n: int, threads: int, rounds: int) -> tuple[float, float, float]:
    """Seconds of one product: ours, ggml's; and the bytes of the weights."""
    rng = np.random.default_rng(0)
    raw = random_rows(rng, type_id, m, k)
    x = rng.standard_normal((n, k)).astype(np.float32)
    copies = min(64, -(-CACHE_BYTES // raw.nbytes)) if n < 64 else 1
    repeats = max(1, min(64, OPERATIONS * threads // (m * n * k)), min(copies, 8) if n <= 16 else 1)
    ours = Ours(OurMatmul(type_id, raw, m, k), x, threads, copies, repeats)
    theirs = GgmlMatmul(type_id, raw, m, k, n, threads, copies, repeats)
    theirs.set(x)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for run, seconds in ((ours.run, times[0]), (theirs.run, times[1])):
            if threads > 1:
                time.sleep(SPIN_SECONDS)
            start = time.perf_counter()
            run()
            seconds.append((time.perf_counter() - start) / repeats)
    theirs.close()
    return statistics.median(times[0][1:]), statistics.median(times[1][1:]), raw.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", default=",".join(IDS))
    parser.add_argument("--shapes", default="576x576,1536x576,2048x2048,4096x4096")
    parser.add_argument("--tokens", default="1,2,4,8,16,64,512")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"CPU level {cpu_level()}, {options.threads} thread(s); ours / ggml GOP/s = ratio, GB/s of weights")
    for name in options.types.split(","):
        for shape in options.shapes.split(","):
            m, k = map(int, shape.split("x"))
            if not matmul.supported(IDS[name], m, k):
                continue
            cells = []
            for n in map(int, options.tokens.split(",")):
                ours, theirs, nbytes = measure(IDS[name], m, k, n, options.threads, options.rounds)
                gop = 2e-9 * m * n * k
                cells.append(
                    f"{n}: {gop / ours:.0f}/{gop / theirs:.0f} = {theirs / ours:.2f}, "
                    f"{nbytes / ours * 1e-9:.0f}"
                )
            print(f"{name} {shape:10}", " | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
