"""Blocks of pools in main memory to host slots and back, in one call without the interpreter's lock."""

from __future__ import annotations

import numpy as np
from numba import njit

from backends.cpu import jit  # noqa: F401  sets the cache folder first
from backends.cpu.simd import Emitter, Value, ir, kernel

VECTOR = 64  # bytes
I8 = ir.IntType(8)


@kernel
def copy_bytes(x: Emitter, source: Value, target: Value, vectors: Value, rest: Value) -> None:
    """64 * vectors + rest bytes."""

    def whole(_: Value, carried: list[Value]) -> list[Value]:
        s, t = carried
        x.store(x.load(s), t)
        return [x.add(s, VECTOR), x.add(t, VECTOR)]

    def single(_: Value, carried: list[Value]) -> list[Value]:
        s, t = carried
        x.store(x.load(s, 0, I8), t)
        return [x.add(s, 1), x.add(t, 1)]

    x.loop_maybe(rest, x.loop_maybe(vectors, [source, target], whole), single)


@njit(nogil=True, cache=True)
def copy_pieces(pools, sizes, blocks, slots, spill):
    """For each i, in turn: block `blocks[i]` of all pools to the bytes at address `slots[i]`, or back.

    pools, sizes   int64 [parts]  address of a pool, bytes of a block in it
    blocks, slots  int64 [n]
    """
    for i in range(len(blocks)):
        slot = slots[i]
        for part in range(len(pools)):
            size = sizes[part]
            block = pools[part] + blocks[i] * size
            if spill:
                copy_bytes((block, slot, size // 64, size % 64))
            else:
                copy_bytes((slot, block, size // 64, size % 64))
            slot += size


def copy_pieces_reference(
    pools: list[np.ndarray], blocks: np.ndarray, slots: list[np.ndarray], spill: bool
) -> None:
    """The same of uint8 arrays: pools [blocks, bytes], slots [sum of the pools' bytes] each."""
    for block, slot in zip(blocks, slots, strict=True):
        start = 0
        for pool in pools:
            here, there = pool[block], slot[start : start + pool.shape[1]]
            start += pool.shape[1]
            if spill:
                there[:] = here
            else:
                here[:] = there


__all__ = ["copy_bytes", "copy_pieces", "copy_pieces_reference"]
