"""Blocking: which tokens, rows and columns go through the tiles together."""

from __future__ import annotations

import functools

from numba import cfunc, njit

from backends.cpu import jit  # noqa: F401  (sets numba's cache folder)
from backends.cpu.matmul.activations import LARGEST_TILE, REGION_BYTES, TOKEN_BLOCK, sum_region, tile_size
from backends.cpu.matmul.layout import FLOATS, FORMATS
from backends.cpu.matmul.tiles import multiply_tile
from backends.cpu.matmul.unpack import (
    clear_rows,
    copy_floats,
    copy_rows,
    prefetch_lines,
    prefetch_rows,
    unpack_superblocks,
)

CHUNK = 18  # most blocks along k that are unpacked at a time (all of 576); 16 for the K formats
FLOAT_CHUNK = 8  # of floats, which are not unpacked, that stay in the first cache with a tile's activations
DIRECT_TOKENS = 64 if LARGEST_TILE == 8 else 12  # up to here weights are decoded in registers, not unpacked
ACCUMULATOR_BYTES = TOKEN_BLOCK * 128
UNPACKED_BYTES = 24 * 1024
SCRATCH_BYTES = ACCUMULATOR_BYTES + UNPACKED_BYTES

SIGNATURE = "void(" + ", ".join(["int64"] * 10) + ")"


@njit(cache=True)
def _store_tile(rows, y, row_bytes, count, columns):
    """Copy `count` rows of 32 floats to y, where as many as `columns` of a row belong."""
    if columns >= 32:
        copy_rows((rows, y, row_bytes, count))
        return
    for row in range(count):
        copy_floats((rows + 128 * row, y + row * row_bytes, columns))


@njit(cache=True)
def _chunk_superblocks(superblocks, limit):
    """Superblocks to unpack at a time: near-equal chunks of at most `limit`."""
    chunks = -(-superblocks // limit)
    return -(-superblocks // chunks)


@functools.cache
def compiled_matmul(type_id: int):
    """The cfunc that multiplies by matrices of a format; compiled, or loaded from the cache, on first use.

    Called as `matmul(packed, m, k, activations, n_tokens, y, y_row_bytes, scratch, ith, nth)`, all int64:
    y[token][row] = W . x overwrites float32 rows `y_row_bytes` apart. Thread `ith` of `nth` computes its
    panels of 32 rows and uses `SCRATCH_BYTES` at scratch + ith * SCRATCH_BYTES (64-aligned, as is `packed`).
    """
    fmt = FORMATS[type_id]
    bits, packed_bytes, elements = fmt.bits, fmt.packed_bytes, fmt.elements
    limit = FLOAT_CHUNK if fmt.activation_kind == FLOATS else max(1, CHUNK // fmt.blocks)
    assert limit * fmt.unpacked_bytes <= UNPACKED_BYTES
    # bytes of one token's superblock in the activations' regions
    code_step, scale_step, *_ = REGION_BYTES[fmt.activation_kind]
    sum_step = REGION_BYTES[fmt.activation_kind][sum_region(fmt)]
    sum_start = sum(REGION_BYTES[fmt.activation_kind][: sum_region(fmt)])

    @cfunc(SIGNATURE, nopython=True, cache=True)
    def matmul(packed, m, k, activations, n_tokens, y, y_row_bytes, scratch, ith, nth):
        panels, superblocks = (m + 31) // 32, k // elements
        rows = scratch + ith * SCRATCH_BYTES
        unpacked = rows + ACCUMULATOR_BYTES
        scales = activations + n_tokens * superblocks * code_step
        sums = activations + n_tokens * superblocks * sum_start
        chunk = _chunk_superblocks(superblocks, limit) if n_tokens > DIRECT_TOKENS else superblocks
        for begin in range(0, n_tokens, TOKEN_BLOCK):
            end = min(n_tokens, begin + TOKEN_BLOCK)
            unpack = end - begin > DIRECT_TOKENS
            for panel in range(panels * ith // nth, panels * (ith + 1) // nth):
                target = y + begin * y_row_bytes + 128 * panel
                clear_rows((rows, end - begin))
                for first in range(0, superblocks, chunk):
                    count = min(chunk, superblocks - first)
                    w = source = packed + (panel * superblocks + first) * packed_bytes
                    following = w + count * packed_bytes
                    lines = (count * packed_bytes // 64 * 6) // (end - begin) + 1
                    if unpack and bits < 8:
                        source = unpacked
                        unpack_superblocks(type_id, 0, (w, unpacked, count))
                    token = begin
                    while token < end:
                        size = tile_size(token, n_tokens)
                        base = token * superblocks + first * size
                        q, a = activations + code_step * base, scales + scale_step * base
                        s, out = sums + sum_step * base, rows + 128 * (token - begin)
                        token += size
                        if n_tokens > DIRECT_TOKENS:
                            prefetch_lines((following, lines))
                            following += 64 * lines
                        last = first + count == superblocks
                        if last:
                            y_next = target + (token - begin) * y_row_bytes  # is missing from the caches
                            prefetch_rows((y_next, y_row_bytes, min(size, end - token)))
                        if unpack:
                            multiply_tile(type_id, 1, (size, w, source, q, a, s, out, count))
                        else:
                            multiply_tile(type_id, 0, (size, w, source, q, a, s, out, count))
                        if last:
                            _store_tile(out, y_next - size * y_row_bytes, y_row_bytes, size, m - 32 * panel)

    return matmul
