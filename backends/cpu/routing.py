"""Which experts each token goes to: the first ggml node after the router's.

    route     the router's logits [E, T]   -> [2 U, T]: ids (int32) of the token's U experts, their shares

What is chosen and how it is weighed: models/mixture.py.
"""

from __future__ import annotations

import numpy as np
from numba import cfunc, njit, types

from backends.cpu import jit  # noqa: F401  sets the cache folder first
from backends.cpu.expert_words import (
    CHOSEN,
    P_COUNT_AT,
    P_EXPERT_SCALES,
    P_EXPERTS,
    P_GATING,
    P_GROUPS,
    P_GROUPS_USED,
    P_NORMED,
    P_SCALE,
    P_SCRATCH,
    P_SELECTION_BIAS,
    P_USED,
    SCRATCH_BYTES,
    SIGMOID,
    SIGNATURE,
    SOFTMAX,
    load_f32,
    source_of,
    store_i32,
)
from backends.cpu.linear import float_bits
from backends.cpu.simd import F32, I32, Emitter, Value, kernel
from backends.cpu.vecmath import exp_scalar
from backends.cpu.words import load_i32, load_i64
from backends.ggml.lib import WORD_DATA
from backends.ggml.models.mixture import SMALLEST_SUM

_SMALLEST_SUM = np.float32(SMALLEST_SUM)
_TAKEN = np.float32(-np.inf)


@kernel(returns=types.float32)
def exp_above(x: Emitter, address: Value, top: Value) -> Value:
    """e^(value at `address` - top), `top` the bits of a float that is not below the value."""
    highest = x.b.bitcast(x.b.trunc(top, I32), F32)
    return exp_scalar(x, x.b.fsub(x.load(address, 0, F32, 4), highest))


@kernel(returns=types.float32)
def sigmoid(x: Emitter, address: Value) -> Value:
    """1 / (1 + e^-value) of the value at `address`."""
    minus = x.b.fneg(x.load(address, 0, F32, 4))
    limit = x.f32(88.0)
    minus = x.b.select(x.b.fcmp_ordered(">", minus, limit), limit, minus)
    return x.b.fdiv(x.f32(1.0), x.b.fadd(x.f32(1.0), exp_scalar(x, minus)))


@njit(nogil=True, cache=True)
def _bits(value):
    return np.int64(float_bits(np.float32(value)))


@njit(nogil=True, cache=True)
def _softmax(values, count):
    """In place, of float32 [count]."""
    top, total = np.float32(-np.inf), np.float32(0.0)
    for i in range(count):
        top = max(top, load_f32((values + 4 * i,)))
    for i in range(count):
        chance = exp_above((values + 4 * i, _bits(top)))
        total += chance
        store_i32((values + 4 * i, _bits(chance)))
    for i in range(count):
        store_i32((values + 4 * i, _bits(load_f32((values + 4 * i,)) / total)))


@njit(nogil=True, cache=True)
def _weigh(p, logits, chances):
    """What each expert is worth to a token, float32 [E] at `chances`. False where logits are not sane."""
    experts, gating = load_i64((p + 8 * P_EXPERTS,)), load_i64((p + 8 * P_GATING,))
    top, low = np.float32(-np.inf), np.float32(np.inf)
    for e in range(experts):
        logit = load_f32((logits + 4 * e,))
        if not logit < np.inf:
            return False
        top, low = max(top, logit), min(low, logit)
        store_i32((chances + 4 * e, _bits(logit)))
    if top == -np.inf or (gating == CHOSEN and low == -np.inf):  # an unlikely one has a chance of 0
        return False
    if gating == SOFTMAX:
        _softmax(chances, experts)
    elif gating == SIGMOID:
        for e in range(experts):
            store_i32((chances + 4 * e, _bits(sigmoid((chances + 4 * e,)))))
    return True


@njit(nogil=True, cache=True)
def _two_best(scores, count):
    """The sum of the two highest of float32 [count]."""
    first = second = np.float32(-np.inf)
    for i in range(count):
        score = load_f32((scores + 4 * i,))
        if score > first:
            first, second = score, first
        elif score > second:
            second = score
    return first + second


@njit(nogil=True, cache=True)
def _best(scores, count):
    """The highest of float32 [count], the first of equals."""
    best, top = np.int64(0), np.float32(-np.inf)
    for i in range(count):
        score = load_f32((scores + 4 * i,))
        if score > top:
            best, top = np.int64(i), score
    return best


@njit(nogil=True, cache=True)
def _keep_groups(p, scores, sums):
    """Take out the experts of all groups but the best. `sums`: float32 [groups] to work in."""
    experts, groups = load_i64((p + 8 * P_EXPERTS,)), load_i64((p + 8 * P_GROUPS,))
    size = experts // groups
    for g in range(groups):
        store_i32((sums + 4 * g, _bits(_two_best(scores + 4 * size * g, size))))
    for _ in range(load_i64((p + 8 * P_GROUPS_USED,))):
        store_i32((sums + 4 * _best(sums, groups), _bits(_TAKEN)))
    for g in range(groups):
        if load_f32((sums + 4 * g,)) != _TAKEN:
            for e in range(size * g, size * g + size):
                store_i32((scores + 4 * e, _bits(_TAKEN)))


@njit(nogil=True, cache=True)
def _share_out(p, shares, used):
    """From what the chosen experts are worth, float32 [U] at `shares`, to what they contribute."""
    if load_i64((p + 8 * P_GATING,)) == CHOSEN:
        _softmax(shares, used)
    total = np.float32(1.0)
    if load_i64((p + 8 * P_NORMED,)) != 0:
        total = np.float32(0.0)
        for slot in range(used):
            total += load_f32((shares + 4 * slot,))
        total = max(total, _SMALLEST_SUM)
    scale = load_f32((p + 8 * P_SCALE,))
    for slot in range(used):
        at = shares + 4 * slot
        store_i32((at, _bits(load_f32((at,)) / total * scale)))


@njit(nogil=True, cache=True)
def _route_token(p, logits, chances, out):
    """Ids of a token's experts, the best first, and their shares; NaN shares where logits are not sane.

    `chances`: float32 [3 E] to work in.
    """
    experts, used = load_i64((p + 8 * P_EXPERTS,)), load_i64((p + 8 * P_USED,))
    if not _weigh(p, logits, chances):
        for slot in range(used):
            store_i32((out + 4 * slot, np.int64(slot)))
            store_i32((out + 4 * (used + slot), _bits(np.nan)))
        return
    bias, scores = load_i64((p + 8 * P_SELECTION_BIAS,)), chances + 4 * experts
    for e in range(experts):
        score = load_f32((chances + 4 * e,))
        if bias != 0:
            score += load_f32((bias + 4 * e,))
        store_i32((scores + 4 * e, _bits(score)))
    if load_i64((p + 8 * P_GROUPS,)) > 1:
        _keep_groups(p, scores, scores + 4 * experts)
    for slot in range(used):
        best = _best(scores, experts)
        store_i32((scores + 4 * best, _bits(_TAKEN)))
        store_i32((out + 4 * slot, best))
        store_i32((out + 4 * (used + slot), load_i32((chances + 4 * best,))))
    _share_out(p, out + 4 * used, used)
    scales = load_i64((p + 8 * P_EXPERT_SCALES,))
    if scales != 0:
        for slot in range(used):
            at, scale = out + 4 * (used + slot), scales + 4 * np.int64(load_i32((out + 4 * slot,)))
            store_i32((at, _bits(load_f32((at,)) * load_f32((scale,)))))


@njit(nogil=True, cache=True)
def route_share(p, logits, out, ith, nth):
    """One thread's tokens."""
    count = load_i64((load_i64((p + 8 * P_COUNT_AT,)),))
    experts, used = load_i64((p + 8 * P_EXPERTS,)), load_i64((p + 8 * P_USED,))
    chances = load_i64((p + 8 * P_SCRATCH,)) + ith * SCRATCH_BYTES
    for token in range(ith, count, nth):
        _route_token(p, logits + 4 * experts * token, chances, out + 8 * used * token)


@cfunc(SIGNATURE, cache=True)
def route_operator(tensor, ith, nth, p):
    """ggml custom operator: source 0 the router's logits."""
    out = load_i64((tensor + 8 * WORD_DATA,))
    route_share(p, source_of(tensor, 0), out, np.int64(ith), np.int64(nth))


__all__ = ["route_operator"]
