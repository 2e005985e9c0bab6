"""What this machine could do at best: four-byte dot products from registers, and reading memory."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from numba import njit

from backends.cpu import jit  # noqa: F401  (sets numba's cache folder)
from backends.cpu.features import cpu_level
from backends.cpu.matmul.codes import dot_bytes
from backends.cpu.simd import I32X16, Emitter, Value, kernel
from backends.cpu.step import aligned_empty

# independent sums, so that no dot product waits for another: 16 of 32 registers of 512 bits, 12 of 16 of 256
CHAINS = 16 if cpu_level() == "avx512_vnni" else 6
OPERATIONS = CHAINS * 16 * 4 * 2  # of one round: a multiplication and an addition for each byte
DOT_ROUNDS = 1 << 20
READ_BYTES = 256 << 20  # far more than caches hold
LINES_AT_ONCE = 8
TRIES = 3


@kernel
def _dot_rounds(x: Emitter, memory: Value, rounds: Value) -> None:
    """Rounds of dot products of 64 bytes at `memory` with one word for each chain, from the first cache."""

    def step(_: Value, carried: list[Value]) -> list[Value]:
        weights, *sums = carried
        words = [x.broadcast_i32(memory, 64 + 4 * chain) for chain in range(CHAINS)]
        if cpu_level() == "avx2":  # or LLVM would multiply once, before the loop
            weights = x.b.add(weights, x.splat_i32(1))
        return [
            weights,
            *(dot_bytes(x, s, weights, word, False) for s, word in zip(sums, words, strict=True)),
        ]

    start = x.load(memory, 0, I32X16, 64)
    for total in x.loop(rounds, [start, *[x.splat_i32(0)] * CHAINS], step)[1:]:
        x.store(x.b.add(x.load(memory, 128, I32X16), total), memory, 128)


@kernel
def _read_lines(x: Emitter, memory: Value, lines: Value, result: Value) -> None:
    """Read `lines` cache lines, a multiple of LINES_AT_ONCE."""

    def step(i: Value, sums: list[Value]) -> list[Value]:
        at = x.add(memory, x.mul(i, 64 * LINES_AT_ONCE))
        return [x.b.xor(s, x.load(at, 64 * n, I32X16, 64)) for n, s in enumerate(sums)]

    rounds = x.b.sdiv(lines, x.const(LINES_AT_ONCE))
    for total in x.loop(rounds, [x.splat_i32(0)] * LINES_AT_ONCE, step):
        x.store(x.b.xor(x.load(result, 0, I32X16), total), result)


@njit(nogil=True, cache=True)
def _dot(memory, rounds):
    _dot_rounds((memory, rounds))


@njit(nogil=True, cache=True)
def _read(memory, lines, result):
    _read_lines((memory, lines, result))


def clock(threads: int) -> Callable[[], float]:
    """A clock in seconds for the work of so many threads.

    For one it is that thread's time on a CPU, to which other programs that want the CPU do not add. (On
    Windows that would tick 64 times a second.)
    """
    return time.thread_time if threads == 1 and sys.platform != "win32" else time.perf_counter


def dot_peak(threads: int) -> float:
    """Operations a second (a multiply-add counts as two) of this level's dot products, on all threads."""
    memory = [aligned_empty(256).ctypes for _ in range(threads)]
    return threads * DOT_ROUNDS * OPERATIONS / _best(lambda i: _dot(memory[i].data, DOT_ROUNDS), threads)


def read_bandwidth(threads: int) -> float:
    """Bytes a second of reading READ_BYTES, with nothing done to them, each thread its part."""
    memory, share = aligned_empty(READ_BYTES), READ_BYTES // threads // 4096 * 4096
    memory[:] = 1  # pages that were never written are all one page of zeros
    results = [aligned_empty(64).ctypes for _ in range(threads)]
    start = memory.ctypes.data
    seconds = _best(lambda i: _read(start + i * share, share // 64, results[i].data), threads)
    return threads * share / seconds


def _best(work: Callable[[int], None], threads: int) -> float:
    """Seconds of the fastest of some tries; `work(i)` is thread i's part."""
    work(0)  # compiles
    best, now = float("inf"), clock(threads)
    for _ in range(TRIES):
        others = [threading.Thread(target=work, args=(i,)) for i in range(1, threads)]
        start = now()
        for thread in others:
            thread.start()
        work(0)
        for thread in others:
            thread.join()
        best = min(best, now() - start)
    return best


__all__ = ["clock", "dot_peak", "read_bandwidth"]
