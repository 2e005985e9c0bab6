"""The chosen experts of each token by our own matmul: two ggml nodes after that of arranging.py.

    gate   arranged rows                      -> activation(gate) * up of each row, quantized
    down   those, the table, maybe a residual -> [n_embd, T]

Threads take parts of UNIT columns of a segment in `gate`, as they come, and have columns of their own in
`down`: the sum over a token's experts, in the order of their ids, then needs no other thread. A row's bits
depend on nothing else in the batch, as each product's do (matmul/__init__.py).
"""

from __future__ import annotations

import numpy as np
from numba import cfunc, njit

from backends.cpu import jit  # noqa: F401  sets the cache folder first
from backends.cpu.arranging import row_bytes
from backends.cpu.attention import fetch_add
from backends.cpu.expert_words import (
    P_COUNT_AT,
    P_COUNTER,
    P_K,
    P_KIND,
    P_MATRICES,
    P_MODE,
    P_ROW,
    P_SCRATCH,
    P_USED,
    P_WIDTH,
    PRODUCT_BYTES,
    SCRATCH_BYTES,
    SIGNATURE,
    UNIT,
    source_of,
)
from backends.cpu.linear import OAI, add_floats, quantize_mode, quantize_token
from backends.cpu.matmul.activations import (
    BLOCK_ELEMENTS,
    BLOCKWISE,
    FLOATS,
    SUPERBLOCKWISE,
    region_addresses,
    tile_size,
)
from backends.cpu.matmul.unpack import copy_rows
from backends.cpu.simd import Emitter, Value, call_address, kernel
from backends.cpu.words import fill_zero, load_i32, load_i64
from backends.ggml.lib import WORD_DATA, WORD_SRC

# words of a matrix among the parameters; bytes of an expert and a panel, and as in linear.py; address of the
# biases, float32 [experts][outputs], or 0
MATRIX_WORDS = 7
W_FUNCTION, W_PACKED, W_EXPERT, W_PANEL, W_OFFSET, W_ROW, W_BIAS = range(MATRIX_WORDS)


@kernel
def add_scaled(x: Emitter, target: Value, source: Value, factor: Value, vectors: Value) -> None:
    """target[i] += source[i] * factor for 16 * vectors floats; `factor` is an address."""
    scale = x.broadcast_f32(factor)

    def vector(i: Value, _: list[Value]) -> list[Value]:
        at = x.mul(i, 64)
        x.store(x.fma(x.load(source, at), scale, x.load(target, at)), target, at)
        return []

    x.loop(vectors, [], vector)


@njit(nogil=True, cache=True)
def _multiply(p, index, inputs, rows, segment, column, width, y, y_row_bytes, scratch):
    """Columns [column, column + width) of one matrix for one segment (the address of its entry)."""
    matrix = p + 8 * (P_MATRICES + MATRIX_WORDS * index)
    expert, first, size = load_i32((segment,)), load_i32((segment + 4,)), load_i32((segment + 8,))
    weights = load_i64((matrix + 8 * W_PACKED,)) + expert * load_i64((matrix + 8 * W_EXPERT,))
    weights += column // 32 * load_i64((matrix + 8 * W_PANEL,))
    inputs += rows * load_i64((matrix + 8 * W_OFFSET,)) + first * load_i64((matrix + 8 * W_ROW,))
    function, k = load_i64((matrix + 8 * W_FUNCTION,)), load_i64((p + 8 * P_K,))
    alone = (np.int64(0), np.int64(1))  # one thread of one
    call_address(function, (weights, width, k, inputs, size, y, y_row_bytes, scratch, *alone))


@njit(nogil=True, cache=True)
def _bias_at(p, index, segment, outputs, column):
    """Address of the bias of a segment's expert from a column on; 0: it has none."""
    bias = load_i64((p + 8 * (P_MATRICES + MATRIX_WORDS * index + W_BIAS),))
    return bias if bias == 0 else bias + 4 * (load_i32((segment,)) * outputs + column)


@njit(nogil=True, cache=True)
def _add_bias(bias, y, y_row_bytes, segment, width):
    """To each row of a segment's product, float32 [rows][width]."""
    if bias != 0:
        for row in range(load_i32((segment + 8,))):
            add_floats((y + y_row_bytes * row, bias, width))


@njit(nogil=True, cache=True)
def _quantize_oai(kind, arguments):
    """As linear.quantize_mode."""
    if kind == BLOCKWISE:
        quantize_token(BLOCKWISE, OAI, arguments)
    elif kind == FLOATS:
        quantize_token(FLOATS, OAI, arguments)
    else:
        quantize_token(SUPERBLOCKWISE, OAI, arguments)


@njit(nogil=True, cache=True)
def _quantize_unit(p, y, segment, column, width, out):
    """activation(gate) * up of a unit's columns, to their place in the quantized segment."""
    kind, mode, m = load_i64((p + 8 * P_KIND,)), load_i64((p + 8 * P_MODE,)), load_i64((p + 8 * P_WIDTH,))
    first, rows = load_i32((segment + 4,)), load_i32((segment + 8,))
    elements = BLOCK_ELEMENTS[kind]
    target = out + first * row_bytes(kind, m)
    start = np.int64(0)
    while start < rows:
        size = tile_size(start, rows)
        for row in range(start, start + size):
            gate = y + 8 * UNIT * row - 4 * column  # blocks are counted from column 0
            one, two, three, four = region_addresses(kind, target, row, start, rows, m)
            start_of = (gate, gate + 4 * UNIT, np.int64(0), np.int64(size), column // elements)
            arguments = (*start_of, width // elements, one, two, three, four)
            if mode == OAI:
                _quantize_oai(kind, arguments)
            else:
                quantize_mode(kind, mode, arguments)
        start += size


@njit(nogil=True, cache=True)
def gate_share(p, arranged, out, ith):
    """Units that this thread came first to."""
    rows = load_i64((load_i64((p + 8 * P_COUNT_AT,)),)) * load_i64((p + 8 * P_USED,))
    m, counter = load_i64((p + 8 * P_WIDTH,)), load_i64((p + 8 * P_COUNTER,))
    table = arranged + rows * load_i64((p + 8 * P_ROW,))
    y, stride = load_i64((p + 8 * P_SCRATCH,)) + ith * SCRATCH_BYTES, np.int64(8 * UNIT)
    parts = -(-m // UNIT)
    units = load_i32((table,)) * parts
    while True:
        unit = fetch_add(counter, np.int64(1))
        if unit >= units:
            return
        segment, column = table + 4 * (1 + unit // parts * 3), unit % parts * UNIT
        width, scratch = min(np.int64(UNIT), m - column), y + PRODUCT_BYTES
        _multiply(p, 0, arranged, rows, segment, column, width, y, stride, scratch)
        _multiply(p, 1, arranged, rows, segment, column, width, y + 4 * UNIT, stride, scratch)
        for index in range(2):
            bias = _bias_at(p, index, segment, m, column)
            _add_bias(bias, y + 4 * UNIT * index, stride, segment, width)
        _quantize_unit(p, y, segment, column, width, out)


@njit(nogil=True, cache=True)
def down_share(p, quantized, arranged, residual, out, ith, nth):
    """One thread's columns of all tokens: the residual, then one segment after the other."""
    count, m = load_i64((load_i64((p + 8 * P_COUNT_AT,)),)), load_i64((p + 8 * P_WIDTH,))
    rows = count * load_i64((p + 8 * P_USED,))
    table = arranged + rows * load_i64((p + 8 * P_ROW,))
    tokens, shares = table + 4 * (1 + 3 * rows), table + 4 * (1 + 4 * rows)
    y, stride = load_i64((p + 8 * P_SCRATCH,)) + ith * SCRATCH_BYTES, np.int64(4 * UNIT)
    begin, end = 32 * (m // 32 * ith // nth), 32 * (m // 32 * (ith + 1) // nth)
    if begin == end:
        return
    for token in range(count):
        at = 4 * (m * token + begin)
        if residual != 0:
            copy_rows((residual + at, out + at, np.int64(128), (end - begin) // 32))
        else:
            fill_zero((out + at, (end - begin) // 16))
    for index in range(load_i32((table,))):
        segment = table + 4 * (1 + 3 * index)
        first, size = load_i32((segment + 4,)), load_i32((segment + 8,))
        for column in range(begin, end, UNIT):
            width = min(np.int64(UNIT), end - column)
            _multiply(p, 0, quantized, rows, segment, column, width, y, stride, y + PRODUCT_BYTES)
            _add_bias(_bias_at(p, 0, segment, m, column), y, stride, segment, width)
            for row in range(first, first + size):
                target = out + 4 * (m * load_i32((tokens + 4 * row,)) + column)
                add_scaled((target, y + stride * (row - first), shares + 4 * row, width // 16))


@cfunc(SIGNATURE, cache=True)
def gate_operator(tensor, ith, nth, p):
    """ggml custom operator: source 0 arranged rows."""
    gate_share(p, source_of(tensor, 0), load_i64((tensor + 8 * WORD_DATA,)), np.int64(ith))


@cfunc(SIGNATURE, cache=True)
def down_operator(tensor, ith, nth, p):
    """ggml custom operator: source 0 from `gate`, 1 arranged rows for their table, 2 the residual, if any."""
    quantized, arranged, residual = source_of(tensor, 0), source_of(tensor, 1), np.int64(0)
    if load_i64((tensor + 8 * (WORD_SRC + 2),)) != 0:
        residual = source_of(tensor, 2)
    out = load_i64((tensor + 8 * WORD_DATA,))
    down_share(p, quantized, arranged, residual, out, np.int64(ith), np.int64(nth))


__all__ = ["down_operator", "gate_operator"]
