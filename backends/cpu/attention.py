"""Paged attention on the CPU: one kernel for decode and for prefill chunks.

Pools are [block][kv head] of parts, which kv_codes.py draws; a block is 16 tokens.

An item is up to `QUERY_ROWS` rows (a few query tokens, times the query heads that share a KV head);
each block is read once per item. Threads take items from a shared counter.

Blocks lie anywhere in the pools and are too short for a CPU to guess what comes next, so the next
chunk's are fetched while one is worked on: line by line, since a core waits for few at a time.
`make bench-attention` prints the share of the memory's bandwidth (Zen 5: 29 % without, over 60 % so).

Batch invariance: a row's arithmetic depends on its own position only. Scores are summed over the
dimension in ascending order and then scaled, the running softmax (Milakov and Gimelshein, arXiv
1805.02867) is updated at chunks of 64 tokens that start at multiples of 64, values are added in token
order. How many rows or blocks a microkernel treats at a time changes which registers are used, not the
bits.
"""

from __future__ import annotations

import numpy as np
from numba import cfunc, njit, types
from numba.extending import intrinsic

from backends.cpu import jit  # noqa: F401  sets the cache folder first
from backends.cpu import step as S
from backends.cpu.attention_kernels import (
    CHUNK,
    SCORE_ROW_BYTES,
    begin_with_sink,
    divide_by_sum,
    reset_state,
    soft_cap,
    softmax_update,
)
from backends.cpu.attention_pools import SPARE_BYTES
from backends.cpu.simd import I64, call_address
from backends.cpu.words import fill_zero, load_i32, load_i64, store_i64
from backends.ggml.lib import WORD_DATA, WORD_SRC

# scratch of one thread: scores, then int64 arrays of QUERY_ROWS or CHUNK_BLOCKS entries
_SCORES = 0
_QUERY_AT = _SCORES + S.QUERY_ROWS * SCORE_ROW_BYTES
_OUT_AT = _QUERY_AT + 8 * S.QUERY_ROWS
_STATE = _OUT_AT + 8 * S.QUERY_ROWS  # float32 pairs: running maximum, running sum
_BLOCKS = _STATE + 8 * S.QUERY_ROWS  # addresses of keys, then of values
_VALUES = 8 * S.CHUNK_BLOCKS
_BLOCKS_AHEAD = _BLOCKS + 2 * _VALUES  # the next chunk's
_SPARE = -(-(_BLOCKS_AHEAD + 2 * _VALUES) // 64) * 64
SCRATCH_BYTES = _SPARE + SPARE_BYTES

# words of an attention operator's parameters; P_KEY_BYTES and P_VALUE_BYTES are kv_codes.part_bytes,
# P_SCORES and P_VALUES the addresses of functions of attention_pools.py, P_SOFTCAP the bits of a float32,
# P_SINKS the address of a float32 for each head, or 0
(
    P_HEADER,
    P_GROUP,
    P_HEADS,
    P_KV_HEADS,
    P_DIM_K,
    P_DIM_V,
    P_WINDOW,
    P_KEY_POOL,
    P_VALUE_POOL,
    P_COUNTER,
    P_KEY_BYTES,
    P_VALUE_BYTES,
    P_SCORES,
    P_VALUES,
    P_SOFTCAP,
    P_SINKS,
) = range(16)
NUM_PARAMS = 16


@intrinsic
def fetch_add(typing_context, address, amount):
    """Atomically add to the int64 at an address and return what was there."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "monotonic")

    return types.int64(types.int64, types.int64), codegen


@njit(nogil=True, cache=True)
def block_addresses(table, blocks, kv_heads, kv_head, pools, out):
    """Where one KV head's keys and values of `blocks` blocks are: CHUNK_BLOCKS addresses of each, the last
    block's again where there are fewer. `pools`: key pool, bytes of a part of it, value pool, bytes."""
    key_pool, key_bytes, value_pool, value_bytes = pools
    for b in range(S.CHUNK_BLOCKS):
        part = load_i32((table + 4 * min(b, blocks - 1),)) * kv_heads + kv_head
        store_i64((out + 8 * b, key_pool + part * key_bytes))
        store_i64((out + _VALUES + 8 * b, value_pool + part * value_bytes))


@njit(nogil=True, cache=True)
def begin_rows(scratch, query, out, row0, rows, shape, sinks):
    """Write down where an item's rows read and write, and clear their sums.

    A head's sink (arXiv 2508.10925) is the score of a token before all others, whose value is zero.
    """
    heads, share, kv_head, dim_k, dim_v = shape
    for r in range(rows):
        head_row = (row0 + r // share) * heads + kv_head * share + r % share
        store_i64((scratch + _QUERY_AT + 8 * r, query + 4 * head_row * dim_k))
        store_i64((scratch + _OUT_AT + 8 * r, out + 4 * head_row * dim_v))
        fill_zero((out + 4 * head_row * dim_v, dim_v // 16))
        if sinks == 0:
            reset_state((scratch + _STATE + 8 * r,))
        else:
            begin_with_sink((scratch + _STATE + 8 * r, sinks + 4 * (kv_head * share + r % share)))


@njit(nogil=True, cache=True)
def attend_item(params, header, scratch, query, out, sequence, row0, count, kv_head):
    """Attention of the query tokens [row0, row0 + count) of one sequence, for one KV head."""
    heads, kv_heads = load_i64((params + 8 * P_HEADS,)), load_i64((params + 8 * P_KV_HEADS,))
    dim_k, dim_v = load_i64((params + 8 * P_DIM_K,)), load_i64((params + 8 * P_DIM_V,))
    window, capped = load_i64((params + 8 * P_WINDOW,)), load_i64((params + 8 * P_SOFTCAP,)) != 0
    key_pool, value_pool = load_i64((params + 8 * P_KEY_POOL,)), load_i64((params + 8 * P_VALUE_POOL,))
    group = header + 8 * (S.GROUPS + S.WORDS_PER_GROUP * load_i64((params + 8 * P_GROUP,)))
    table = load_i64((group + 8,)) + 4 * sequence * load_i64((group + 16,))
    positions = load_i64((header + 8 * S.POSITIONS,))
    share = heads // kv_heads
    rows = count * share
    query_at, out_at, states = scratch + _QUERY_AT, scratch + _OUT_AT, scratch + _STATE
    vectors = dim_v // 16
    key_bytes, value_bytes = load_i64((params + 8 * P_KEY_BYTES,)), load_i64((params + 8 * P_VALUE_BYTES,))
    score_rows, value_rows = load_i64((params + 8 * P_SCORES,)), load_i64((params + 8 * P_VALUES,))
    sinks = load_i64((params + 8 * P_SINKS,))
    begin_rows(scratch, query, out, row0, rows, (heads, share, kv_head, dim_k, dim_v), sinks)
    first = load_i32((positions + 4 * row0,))  # a sequence's rows are at consecutive positions
    end = first + count
    begin = max(0, first - window + 1) if window > 0 else 0
    for chunk in range(begin // CHUNK, (end - 1) // CHUNK + 1):
        base = chunk * CHUNK
        # queries whose window reaches into this chunk: positions [base, base + CHUNK + window - 1)
        q0 = max(0, base - first)
        q1 = min(count, base + CHUNK + window - 1 - first) if window > 0 else count
        if q0 >= q1:
            continue
        tokens = min(CHUNK, first + q1 - base)
        blocks = (tokens + S.BLOCK_SIZE - 1) // S.BLOCK_SIZE
        entries = table + 4 * chunk * S.CHUNK_BLOCKS
        pools = (key_pool, key_bytes, value_pool, value_bytes)
        at = ahead = scratch + _BLOCKS
        block_addresses(entries, blocks, kv_heads, kv_head, pools, at)
        coming = (end - base - CHUNK + S.BLOCK_SIZE - 1) // S.BLOCK_SIZE
        if coming > 0:
            ahead = scratch + _BLOCKS_AHEAD
            block_addresses(entries + 4 * S.CHUNK_BLOCKS, coming, kv_heads, kv_head, pools, ahead)
        r0, n = q0 * share, (q1 - q0) * share
        rows_at = scratch + _SCORES + SCORE_ROW_BYTES * r0
        call_address(score_rows, (query_at + 8 * r0, at, ahead, rows_at, dim_k, n, blocks))
        for r in range(r0, r0 + n):
            position = first + r // share
            low = max(0, position - window + 1 - base) if window > 0 else 0
            high = min(CHUNK, position + 1 - base)
            if capped:
                soft_cap((scratch + _SCORES + SCORE_ROW_BYTES * r, params + 8 * P_SOFTCAP))
            softmax_update(
                (
                    scratch + _SCORES + SCORE_ROW_BYTES * r,
                    low,
                    high,
                    states + 8 * r,
                    load_i64((out_at + 8 * r,)),
                    vectors,
                )
            )
        places = (rows_at, at + _VALUES, ahead + _VALUES, out_at + 8 * r0)
        call_address(value_rows, (*places, dim_v, n, tokens, scratch + _SPARE))
    for r in range(rows):
        divide_by_sum((load_i64((out_at + 8 * r,)), states + 8 * r, vectors))


@njit(nogil=True, cache=True)
def attend_share(params, query, out, padded_rows, ith):
    """One thread's part: items from the shared counter until there are none left."""
    header = load_i64((params + 8 * P_HEADER,))
    scratch = load_i64((header + 8 * S.SCRATCH,)) + ith * load_i64((header + 8 * S.SCRATCH_STRIDE,))
    items = load_i64((header + 8 * S.ITEMS,))
    kv_heads = load_i64((params + 8 * P_KV_HEADS,))
    total = load_i64((header + 8 * S.NUM_ITEMS,)) * kv_heads
    counter = load_i64((params + 8 * P_COUNTER,))
    if ith == 0:  # padding rows must hold numbers, whatever they are
        width = load_i64((params + 8 * P_HEADS,)) * load_i64((params + 8 * P_DIM_V,))
        tokens = load_i64((header + 8 * S.TOKENS,))
        fill_zero((out + 4 * tokens * width, (padded_rows - tokens) * width // 16))
    while True:
        index = fetch_add(counter, 1)
        if index >= total:
            return
        item = items + 12 * (index // kv_heads)
        attend_item(
            params,
            header,
            scratch,
            query,
            out,
            load_i32((item,)),
            load_i32((item + 4,)),
            load_i32((item + 8,)),
            index % kv_heads,
        )


@cfunc(types.void(types.int64, types.int32, types.int32, types.int64), cache=True)
def attention_operator(tensor, ith, nth, params):
    """ggml custom operator: out [dim_v * heads, T] from rotated, scaled queries [dim_k * heads, T]."""
    query = load_i64((load_i64((tensor + 8 * WORD_SRC,)) + 8 * WORD_DATA,))
    rows = load_i64((tensor + 8 * 3,))  # ne[1]
    attend_share(params, query, load_i64((tensor + 8 * WORD_DATA,)), rows, np.int64(ith))


__all__ = ["NUM_PARAMS", "SCRATCH_BYTES", "attention_operator"]
