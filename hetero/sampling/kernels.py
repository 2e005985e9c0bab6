"""Numba kernels of the sampler. A result depends on one row alone, by a fixed order of additions."""

from __future__ import annotations

import numpy as np
from numba import njit

BLOCK = 512  # tokens summed, scanned or exponentiated at a time; a multiple of LANES
LANES = 16
OK, NOT_FINITE, NOTHING_ALLOWED = 0, 1, 2

# Columns of the `settings` matrix of `sample_rows`.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)

_MAGIC = 6755399441055744.0  # 1.5 * 2**52: adding it rounds to an integer in the low mantissa bits
_LOG2E = 1.4426950408889634
_LN2_HI = 0.6931471803691238
_LN2_LO = 1.9082149292705877e-10
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


@njit(nogil=True, cache=True)
def uniform(seed, position):
    """Float64 in [0, 1): draw `position` (uint64) of the splitmix64 stream that `seed` (uint64) starts.

    Splitmix64 (Steele, Lea, Flood 2014) is a counter-based generator: draw n needs no draw before it.
    """
    z = seed ^ _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    z = (z ^ (z >> np.uint64(31))) + (position + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit(nogil=True, cache=True)
def row_max(x):
    """(max, lowest index of it, all < +inf and no NaN) of float32 [n]."""
    n = x.shape[0]
    acc = np.empty(LANES, np.float32)
    bad = np.zeros(LANES, np.int32)
    best, best_block, start = np.float32(-np.inf), 0, 0
    while start + BLOCK <= n:
        acc[:] = -np.inf
        for i in range(start, start + BLOCK, LANES):
            for j in range(LANES):
                v = x[i + j]
                acc[j] = v if v > acc[j] else acc[j]
                bad[j] |= not (v < np.inf)
        for j in range(LANES):
            if acc[j] > best:
                best, best_block = acc[j], start
        start += BLOCK
    for i in range(start, n):
        bad[0] |= not (x[i] < np.inf)
        if x[i] > best:
            best, best_block = x[i], start
    index = best_block
    while index < n - 1 and x[index] != best:
        index += 1
    return best, index, bad.max() == 0


@njit(nogil=True, cache=True)
def exp_shifted(x, shift, factor, out):
    """out[i] = exp((x[i] - shift) * factor) as float64, for x[i] <= shift; relative error below 1e-15.

    Range reduction to |r| <= ln2/2 and a degree 12 Taylor polynomial, written so that LLVM turns each loop
    into vectors: there is no vector exp without a vendor's math library. Below exp(-700) the result is 0.
    """
    n = x.shape[0]
    scale = np.empty(BLOCK, np.float64)
    bits = scale.view(np.int64)
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        xs, os = x[start : start + m], out[start : start + m]
        for j in range(m):
            v = (np.float64(xs[j]) - shift) * factor
            v = v if v >= -700.0 else -701.0
            os[j] = v
            scale[j] = v * _LOG2E + _MAGIC
        for j in range(m):
            v = os[j]
            k = scale[j] - _MAGIC
            r = (v - k * _LN2_HI) - k * _LN2_LO
            q = 2.08767569878681e-09
            q = q * r + 2.505210838544172e-08
            q = q * r + 2.755731922398589e-07
            q = q * r + 2.7557319223985893e-06
            q = q * r + 2.48015873015873e-05
            q = q * r + 0.0001984126984126984
            q = q * r + 0.001388888888888889
            q = q * r + 0.008333333333333333
            q = q * r + 0.041666666666666664
            q = q * r + 0.16666666666666666
            q = q * r + 0.5
            q = q * r + 1.0
            q = q * r + 1.0
            os[j] = q if v > -700.5 else 0.0
        for j in range(m):
            bits[j] = (bits[j] + 1023) << 52  # 2**k: the shift drops _MAGIC's own bits
        for j in range(m):
            os[j] *= scale[j]


@njit(nogil=True, cache=True)
def block_sum(p, start, stop):
    """Sum of p[start:stop] in an order that depends on the two bounds only."""
    a = b = c = d = 0.0
    i = start
    while i + 4 <= stop:
        a += p[i]
        b += p[i + 1]
        c += p[i + 2]
        d += p[i + 3]
        i += 4
    while i < stop:
        a += p[i]
        i += 1
    return (a + b) + (c + d)


@njit(nogil=True, cache=True)
def total(p):
    s = 0.0
    for start in range(0, p.shape[0], BLOCK):
        s += block_sum(p, start, min(start + BLOCK, p.shape[0]))
    return s


@njit(nogil=True, cache=True)
def draw(p, u):
    """Index i with probability p[i] / sum(p): the inverse of the cumulative sum by index, at u in [0, 1)."""
    n = p.shape[0]
    target = u * total(p)
    cum, start = 0.0, 0
    while start + BLOCK < n:
        s = block_sum(p, start, start + BLOCK)
        if cum + s > target:
            break
        cum += s
        start += BLOCK
    last = 0
    for i in range(start, n):
        if p[i] > 0.0:
            last = i
            cum += p[i]
            if cum > target:
                return i
    if p[last] > 0.0:
        return last
    for i in range(start - 1, -1, -1):  # rounding pushed the target past the last possible token
        if p[i] > 0.0:
            return i
    return -1


@njit(nogil=True, cache=True)
def order_keys(x, keys):
    """uint32 keys that sort as the floats do (-0.0 as 0.0)."""
    bits = x.view(np.uint32)
    for i in range(x.shape[0]):
        b = np.uint32(0) if x[i] == 0.0 else bits[i]
        keys[i] = ~b if b >> np.uint32(31) else b | np.uint32(0x80000000)


@njit(nogil=True, cache=True)
def cutoff(keys, p, count, mass):
    """The shortest prefix of the order (key descending, index ascending) with `count` tokens or `mass` of p.

    Returns (key, ties): the prefix holds every token above `key` and the first `ties` tokens equal to it.
    A radix select of 11 + 11 + 10 bits: linear in the tokens, whatever their distribution, and no sort.
    """
    n = keys.shape[0]
    counts = np.empty(2048, np.int64)
    masses = np.empty(2048, np.float64)
    prefix, have_count, have_mass = np.uint32(0), 0, 0.0
    members = np.empty(0, np.int32)
    for level in range(3):
        shift = np.uint32(21) if level == 0 else np.uint32(10) if level == 1 else np.uint32(0)
        digit = np.uint32(0x7FF) if level < 2 else np.uint32(0x3FF)
        counts[:] = 0
        masses[:] = 0.0
        size = n if level == 0 else members.shape[0]
        for m in range(size):
            i = m if level == 0 else members[m]
            b = (keys[i] >> shift) & digit
            counts[b] += 1
            masses[b] += p[i]
        b = int(digit)
        lowest = -1
        while b >= 0:  # the first bucket, from above, in which the prefix ends
            if counts[b] > 0:
                lowest = b
                if have_count + counts[b] >= count or have_mass + masses[b] >= mass:
                    break
                have_count += counts[b]
                have_mass += masses[b]
            b -= 1
        if b < 0:  # rounding: the sum of the parts fell short of the whole
            have_count -= counts[lowest]
            have_mass -= masses[lowest]
            b = lowest
        prefix |= np.uint32(b) << shift
        if level < 2:
            members = _members(keys, members, size, level, shift, np.uint32(b), digit, counts[b])
    first = members[0]
    ties = 0
    while ties < counts[b]:
        ties += 1
        if have_count + ties >= count or have_mass + ties * p[first] >= mass:
            break
    return prefix, ties


@njit(nogil=True, cache=True)
def _members(keys, members, size, level, shift, bucket, digit, count):
    found = np.empty(count, np.int32)
    at = 0
    for m in range(size):
        i = m if level == 0 else members[m]
        if (keys[i] >> shift) & digit == bucket:
            found[at] = i
            at += 1
    return found


@njit(nogil=True, cache=True)
def keep_prefix(keys, p, key, ties):
    """Set p to 0 outside the prefix (key, ties) that `cutoff` returned."""
    for i in range(keys.shape[0]):
        p[i] = p[i] if keys[i] >= key else 0.0
    for i in range(keys.shape[0]):
        if keys[i] == key:
            ties -= 1
            if ties < 0:
                p[i] = 0.0


@njit(nogil=True, cache=True)
def filter_and_draw(x, top, settings, top_k, u, keys, p):
    """Sample an id from processed logits `x` with maximum `top`: temperature, top-k, top-p, min-p."""
    n = x.shape[0]
    exp_shifted(x, np.float64(top), min(1.0 / settings[TEMPERATURE], 1e300), p)  # 1 / denormal is inf
    limit = top_k if 0 < top_k < n else n
    by_mass = settings[TOP_P] < 1.0
    if limit < n or by_mass:
        order_keys(x, keys)
    if limit < n:
        key, ties = cutoff(keys, p, limit, np.inf)
        keep_prefix(keys, p, key, ties)
    if by_mass:
        key, ties = cutoff(keys, p, n, settings[TOP_P] * total(p))
        keep_prefix(keys, p, key, ties)
    if settings[MIN_P] > 0.0:
        for i in range(n):
            p[i] = p[i] if p[i] >= settings[MIN_P] else 0.0
    return draw(p, u)


@njit(nogil=True, cache=True)
def penalize(x, settings, ids, counts):
    """In place, for tokens `ids` seen in the prompt or output, `counts` times in the output."""
    rep = np.float32(settings[REPETITION])
    for k in range(ids.shape[0]):
        v = x[ids[k]]
        v = v / rep if v > 0.0 else v * rep
        if counts[k] > 0:
            v -= np.float32(settings[FREQUENCY] * counts[k] + settings[PRESENCE])
        x[ids[k]] = v


@njit(nogil=True, cache=True)
def apply_mask(x, mask):
    """x[i] = -inf where bit i % 32 of mask[i // 32] (uint32) is 0."""
    n = x.shape[0]
    for w in range(mask.shape[0]):
        word = mask[w]
        if word == np.uint32(0xFFFFFFFF):
            continue
        for i in range(32 * w, min(32 * w + 32, n)):
            if not (word >> np.uint32(i - 32 * w)) & np.uint32(1):
                x[i] = -np.inf


@njit(nogil=True, cache=True)
def top_logits(x, ids, values):
    """The len(ids) largest of x, descending, lower index first among equals."""
    k, filled = ids.shape[0], 0
    for i in range(x.shape[0]):
        if filled == k and not x[i] > values[k - 1]:
            continue
        at = filled if filled < k else k - 1
        while at > 0 and x[i] > values[at - 1]:
            values[at] = values[at - 1]
            ids[at] = ids[at - 1]
            at -= 1
        values[at] = x[i]
        ids[at] = i
        filled = min(filled + 1, k)


@njit(nogil=True, cache=True)
def sample_rows(
    logits, settings, top_k, seeds, positions, bias_at, bias_ids, bias_values, seen_at, seen_ids, seen_counts,
    mask_rows, masks, num_logprobs, keys, p, raw, tokens, status, logprobs, top_ids, top_values,
):  # fmt: skip
    """One token for each of L rows of V logits; `logits` is overwritten.

    logits       float32 [L, V]      settings     float64 [L, 6]  columns TEMPERATURE .. FREQUENCY
    top_k        int64 [L] 0 = off   seeds        uint64 [L]      positions  uint64 [L]
    bias_at      int64 [L + 1]       bias_ids     int32, bias_values float32: row r owns [at[r], at[r + 1])
    seen_at      int64 [L + 1]       seen_ids, seen_counts int32, laid out likewise
    mask_rows    int64 [L]           row of masks (uint32 [M, ceil(V/32)]) or -1
    num_logprobs int64 [L]           -1 = none, else how many most likely tokens to return
    keys, p, raw                     scratch: uint32, float64, float32, [V] each
    tokens, status, logprobs, top_ids, top_values: the results, [L] and [L, K]; status OK or the reason
    """
    for r in range(logits.shape[0]):
        x = logits[r]
        top, best, finite = row_max(x)
        tokens[r] = -1
        if not finite or top == -np.inf:
            status[r] = NOT_FINITE
            continue
        wanted = num_logprobs[r]
        log_total = 0.0
        if wanted >= 0:
            raw[:] = x
            exp_shifted(x, np.float64(top), 1.0, p)
            log_total = np.float64(top) + np.log(total(p))
            if wanted > 0:
                top_logits(x, top_ids[r, :wanted], top_values[r, :wanted])
                for k in range(wanted):
                    top_values[r, k] -= log_total
        changed = False
        for k in range(bias_at[r], bias_at[r + 1]):
            x[bias_ids[k]] += bias_values[k]
            changed = True
        if seen_at[r + 1] > seen_at[r]:
            a, b = seen_at[r], seen_at[r + 1]
            penalize(x, settings[r], seen_ids[a:b], seen_counts[a:b])
            changed = True
        if mask_rows[r] >= 0:
            apply_mask(x, masks[mask_rows[r]])
            changed = True
        if changed:
            top, best, finite = row_max(x)
            if not finite or top == -np.inf:
                status[r] = NOTHING_ALLOWED if finite else NOT_FINITE
                continue
        if settings[r, TEMPERATURE] > 0.0:
            best = filter_and_draw(x, top, settings[r], top_k[r], uniform(seeds[r], positions[r]), keys, p)
        tokens[r] = best
        status[r] = OK
        if wanted >= 0:
            logprobs[r] = np.float64(raw[best]) - log_total
