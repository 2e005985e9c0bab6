"""Which experts each token goes to, and its activations in their order: two ggml nodes after the router's.

    route     the router's logits [E, T]   -> [2 U, T]: ids (int32) of the token's U experts, their shares
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
from numba import cfunc, njit, types

from backends.cpu import jit  # noqa: F401  sets the cache folder first
from backends.cpu.linear import BLOCK_BYTES, NUM_KINDS, float_bits
from backends.cpu.matmul.activations import (
    BLOCK_ELEMENTS,
    REGION_BYTES,
    TOKEN_BLOCK,
    region_addresses,
    tile_size,
)
from backends.cpu.matmul.drive import SCRATCH_BYTES as MATMUL_SCRATCH_BYTES
from backends.cpu.simd import F32, I32, Emitter, Value, kernel
from backends.cpu.vecmath import exp_scalar
from backends.cpu.words import load_i32, load_i64, store_i64
from backends.ggml.lib import WORD_DATA, WORD_SRC
from backends.ggml.models.experts import SMALLEST_SUM

SEGMENT = TOKEN_BLOCK
UNIT = 256  # columns: eight panels of weights, whole blocks of activations of every kind
PRODUCT_BYTES = SEGMENT * UNIT * 2 * 4  # gate | up of a unit; before that, what a thread sorts with
SCRATCH_BYTES = PRODUCT_BYTES + MATMUL_SCRATCH_BYTES  # of each thread

# Words of the operators' parameters, of which each uses some. K, WIDTH: of the products' inputs and outputs.
# ROW: bytes of an arranged row, in all its kinds. Kinds, those of the tokens and of the arranged rows, are
# bits (1 << BLOCKWISE, ...); KIND is the one that `gate` quantizes to. MODE: as in linear.py.
(P_COUNT_AT, P_EXPERTS, P_USED, P_SCRATCH, P_K, P_WIDTH, P_ROW) = range(7)
(P_SOURCE_KINDS, P_KINDS, P_KIND, P_MODE, P_COUNTER, P_MATRICES) = range(7, 13)

_SMALLEST_SUM = np.float32(SMALLEST_SUM)
_TAKEN = np.float32(-1.0)


def table_words(used: int) -> int:
    """Words of the table for each token with `used` rows, bounded from above: no segment is without a row."""
    return 1 + 5 * used


@kernel(returns=types.float32)
def load_f32(x: Emitter, address: Value) -> Value:
    return x.load(address, 0, F32, 4)


@kernel
def store_i32(x: Emitter, address: Value, value: Value) -> None:
    x.store(x.b.trunc(value, I32), address, 0, 4)


@kernel(returns=types.float32)
def exp_above(x: Emitter, address: Value, top: Value) -> Value:
    """e^(value at `address` - top), `top` the bits of a float that is not below the value."""
    highest = x.b.bitcast(x.b.trunc(top, I32), F32)
    return exp_scalar(x, x.b.fsub(x.load(address, 0, F32, 4), highest))


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
def _bits(value):
    return np.int64(float_bits(np.float32(value)))


@njit(nogil=True, cache=True)
def _chances(logits, experts, out):
    """Softmax of a token's logits to float32 at `out`. False where one is NaN or infinite."""
    top = np.float32(-np.inf)
    for e in range(experts):
        logit = load_f32((logits + 4 * e,))
        if not logit < np.inf:
            return False
        top = max(top, logit)
    if top == -np.inf:
        return False
    total = np.float32(0.0)
    for e in range(experts):
        chance = exp_above((logits + 4 * e, _bits(top)))
        total += chance
        store_i32((out + 4 * e, _bits(chance)))
    for e in range(experts):
        store_i32((out + 4 * e, _bits(load_f32((out + 4 * e,)) / total)))
    return True


@njit(nogil=True, cache=True)
def _route_token(logits, experts, used, chances, out):
    """Ids of the most probable experts, lowest of equals, and their shares; NaN shares if there are none."""
    sane = _chances(logits, experts, chances)
    total = np.float32(0.0)
    for slot in range(used):
        best, chance = np.int64(slot), np.float32(np.nan)
        if sane:
            chance = _TAKEN
            for e in range(experts):
                candidate = load_f32((chances + 4 * e,))
                if candidate > chance:
                    best, chance = np.int64(e), candidate
            store_i32((chances + 4 * best, _bits(_TAKEN)))
        total += chance
        store_i32((out + 4 * slot, best))
        store_i32((out + 4 * (used + slot), _bits(chance)))
    if total < _SMALLEST_SUM:
        total = _SMALLEST_SUM
    for slot in range(used):
        at = out + 4 * (used + slot)
        store_i32((at, _bits(load_f32((at,)) / total)))


@njit(nogil=True, cache=True)
def route_share(p, logits, out, ith, nth):
    """One thread's tokens."""
    count = load_i64((load_i64((p + 8 * P_COUNT_AT,)),))
    experts, used = load_i64((p + 8 * P_EXPERTS,)), load_i64((p + 8 * P_USED,))
    chances = load_i64((p + 8 * P_SCRATCH,)) + ith * SCRATCH_BYTES
    for token in range(ith, count, nth):
        _route_token(logits + 4 * experts * token, experts, used, chances, out + 8 * used * token)


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


@njit(nogil=True, cache=True)
def source_of(tensor, index):
    """Address of a source's data."""
    return load_i64((load_i64((tensor + 8 * (WORD_SRC + index),)) + 8 * WORD_DATA,))


SIGNATURE = types.void(types.int64, types.int32, types.int32, types.int64)


@cfunc(SIGNATURE, cache=True)
def route_operator(tensor, ith, nth, p):
    """ggml custom operator: source 0 the router's logits."""
    out = load_i64((tensor + 8 * WORD_DATA,))
    route_share(p, source_of(tensor, 0), out, np.int64(ith), np.int64(nth))


@cfunc(SIGNATURE, cache=True)
def arrange_operator(tensor, ith, nth, p):
    """ggml custom operator: source 0 quantized tokens, source 1 their routes."""
    out = load_i64((tensor + 8 * WORD_DATA,))
    arrange_share(p, source_of(tensor, 0), source_of(tensor, 1), out, np.int64(ith), np.int64(nth))


__all__ = ["arrange_operator", "route_operator", "table_words"]
