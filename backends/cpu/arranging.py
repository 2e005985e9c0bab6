"""The activations of each token in the order of its experts: the ggml node after that of routing.py.

    arrange   quantized tokens, routes     -> quantized rows in the order of the experts, and a table

A row is a token at one of its experts; the T U rows are sorted by expert, then by token. Up to SEGMENT rows
of one expert are a segment, which passes over that expert's weights together and whose activations lie like
those of a batch of its own (matmul/activations.py). With R rows, arranged rows and their table are

    kind 0 of segment 0, 1, ...; kind 1 of segment 0, 1, ...; then in words of 4 bytes
    word 0               S, the number of segments
         1 + 3 s         expert, first row, number of rows of segment s
         1 + 3 R + r     token of row r
         1 + 4 R + r     share of row r, float32
"""

from __future__ import annotations

import numpy as np
from numba import cfunc, njit

from backends.cpu import jit  # noqa: F401  sets the cache folder first
from backends.cpu.expert_words import (
    P_COUNT_AT,
    P_EXPERTS,
    P_K,
    P_KINDS,
    P_ROW,
    P_SCRATCH,
    P_SOURCE_KINDS,
    P_USED,
    SCRATCH_BYTES,
    SEGMENT,
    SIGNATURE,
    source_of,
    store_i32,
)
from backends.cpu.linear import BLOCK_BYTES, NUM_KINDS
from backends.cpu.matmul.activations import BLOCK_ELEMENTS, REGION_BYTES, region_addresses, tile_size
from backends.cpu.simd import I32, Emitter, Value, kernel
from backends.cpu.words import load_i32, load_i64, store_i64
from backends.ggml.lib import WORD_DATA


def table_words(used: int) -> int:
    """Words of the table for each token with `used` rows, bounded from above: no segment is without a row."""
    return 1 + 5 * used


@kernel
def copy_words(
    x: Emitter, source: Value, source_step: Value, target: Value, target_step: Value, count: Value
) -> None:
    """Copy `count` words of 4 bytes that are `source_step` bytes apart."""

    def word(_: Value, carried: list[Value]) -> list[Value]:
        x.store(x.load(carried[0], 0, I32, 4), carried[1], 0, 4)
        return [x.add(carried[0], source_step), x.add(carried[1], target_step)]

    x.loop(count, [source, target], word)


@njit(nogil=True, cache=True)
def row_bytes(kind, k):
    """Bytes of a row of k activations."""
    return k // BLOCK_ELEMENTS[kind] * BLOCK_BYTES[kind]


@njit(nogil=True, cache=True)
def _copy_token(kind, k, source, token, source_start, tokens, target, row, target_start, rows):
    """Token `token` of a batch of `tokens` becomes row `row` of a segment of `rows` (with tiles' starts)."""
    blocks, target_tile = k // BLOCK_ELEMENTS[kind], tile_size(target_start, rows)
    source_tile = tile_size(source_start, tokens)
    inputs = region_addresses(kind, source, token, source_start, tokens, k)
    outputs = region_addresses(kind, target, row, target_start, rows, k)
    for region in range(4):
        words = REGION_BYTES[kind][region] // 4 * blocks
        if words:
            copy_words((inputs[region], 4 * source_tile, outputs[region], 4 * target_tile, words))


@njit(nogil=True, cache=True)
def _tile_start(row, rows):
    """First row of the tile in which a segment of `rows` has a row."""
    start = np.int64(0)
    while start + tile_size(start, rows) <= row:
        start += tile_size(start, rows)
    return start


@njit(nogil=True, cache=True)
def _copy_row(p, source, token, tile, tokens, out, row, first, last):
    """All kinds of a token, whose tile starts at `tile`, to a row of the expert with rows [first, last)."""
    used, k = load_i64((p + 8 * P_USED,)), load_i64((p + 8 * P_K,))
    begin = first + (row - first) // SEGMENT * SEGMENT
    rows = min(SEGMENT, last - begin)
    start = _tile_start(row - begin, rows)
    wanted, there = load_i64((p + 8 * P_KINDS,)), load_i64((p + 8 * P_SOURCE_KINDS,))
    for kind in range(NUM_KINDS):
        size = row_bytes(kind, k)
        if (wanted >> kind) & 1:
            _copy_token(kind, k, source, token, tile, tokens, out + begin * size, row - begin, start, rows)
            out += tokens * used * size
        if (there >> kind) & 1:
            source += tokens * size


@njit(nogil=True, cache=True)
def _sort_rows(routes, count, used, experts, firsts, cursors):
    """Where each expert's rows begin: int64 [E + 1], and a copy."""
    for e in range(experts + 1):
        store_i64((firsts + 8 * e, np.int64(0)))
    for token in range(count):
        for slot in range(used):
            at = firsts + 8 * (load_i32((routes + 4 * (2 * used * token + slot),)) + 1)
            store_i64((at, load_i64((at,)) + 1))
    for e in range(experts):
        first = load_i64((firsts + 8 * e,))
        store_i64((cursors + 8 * e, first))
        store_i64((firsts + 8 * e + 8, first + load_i64((firsts + 8 * e + 8,))))


@njit(nogil=True, cache=True)
def _list_segments(firsts, experts, table):
    segments = np.int64(0)
    for e in range(experts):
        begin, last = load_i64((firsts + 8 * e,)), load_i64((firsts + 8 * e + 8,))
        while begin < last:
            entry = table + 4 * (1 + 3 * segments)
            store_i32((entry, np.int64(e)))
            store_i32((entry + 4, begin))
            store_i32((entry + 8, min(SEGMENT, last - begin)))
            begin += SEGMENT
            segments += 1
    store_i32((table, segments))


@njit(nogil=True, cache=True)
def arrange_share(p, source, routes, out, ith, nth):
    """Every thread sorts, which is little work; each copies its rows, and the first one writes the table."""
    count = load_i64((load_i64((p + 8 * P_COUNT_AT,)),))
    experts, used = load_i64((p + 8 * P_EXPERTS,)), load_i64((p + 8 * P_USED,))
    firsts = load_i64((p + 8 * P_SCRATCH,)) + ith * SCRATCH_BYTES
    cursors = firsts + 8 * (experts + 1)
    rows = count * used
    table = out + rows * load_i64((p + 8 * P_ROW,))
    _sort_rows(routes, count, used, experts, firsts, cursors)
    if ith == 0:
        _list_segments(firsts, experts, table)
    tile = np.int64(0)
    for token in range(count):
        if token == tile + tile_size(tile, count):
            tile = np.int64(token)
        for slot in range(used):
            route = routes + 4 * (2 * used * token + slot)
            expert = load_i32((route,))
            row = load_i64((cursors + 8 * expert,))
            store_i64((cursors + 8 * expert, row + 1))
            if row % nth == ith:
                store_i32((table + 4 * (1 + 3 * rows + row), np.int64(token)))
                store_i32((table + 4 * (1 + 4 * rows + row), load_i32((route + 4 * used,))))
                first, last = load_i64((firsts + 8 * expert,)), load_i64((firsts + 8 * expert + 8,))
                _copy_row(p, source, np.int64(token), tile, count, out, row, first, last)


@cfunc(SIGNATURE, cache=True)
def arrange_operator(tensor, ith, nth, p):
    """ggml custom operator: source 0 quantized tokens, source 1 their routes."""
    out = load_i64((tensor + 8 * WORD_DATA,))
    arrange_share(p, source_of(tensor, 0), source_of(tensor, 1), out, np.int64(ith), np.int64(nth))


__all__ = ["arrange_operator", "row_bytes", "table_words"]
