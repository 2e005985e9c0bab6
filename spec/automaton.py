"""Numba kernels of the suffix automaton in `spec.ngram`."""

from __future__ import annotations

import numpy as np
from numba import njit

# Columns of `states` (int32). A state stands for all substrings that end at the same set of positions.
LENGTH, LINK, RECENT, TOKEN, TARGET, EDGES = range(6)
STATE_COLUMNS = 6
# Columns of `edges` (int32): an edge that is not the first of its state.
E_STATE, E_TOKEN, E_TARGET, E_NEXT, E_CHAIN = range(5)
EDGE_COLUMNS = 5
# Entries of `counts` (int64).
TOKENS, STATES, NUM_EDGES, LAST, MATCH, MATCH_END, ANCHOR, DEPARTED, BESIDE = range(9)
COUNTS = 9

ROOT = 0
REFRESH = 256  # ancestors whose most recent position a new token renews
COPY = 12  # tokens that match before a departure is taken for an edit
PATIENCE = 16  # tokens after which a copy that did not go on is given up
SKIPPED = 8  # tokens of the original that an edit may leave out

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@njit(nogil=True, cache=True, inline="always")
def _bucket(state, token, buckets):
    mixed = ((np.uint64(state) << np.uint64(32)) | np.uint64(token)) * _MULTIPLIER
    return np.int64(mixed >> np.uint64(32)) & (buckets.shape[0] - 1)


@njit(nogil=True, cache=True)
def _find(state, token, states, edges, buckets):
    """Where `token` leads from `state`: (target or -1, edge or -1 for the state's first)."""
    if states[state, TOKEN] == token:
        return states[state, TARGET], -1
    if states[state, EDGES] == -1:
        return -1, -1
    edge = buckets[_bucket(state, token, buckets)]
    while edge != -1:
        if edges[edge, E_STATE] == state and edges[edge, E_TOKEN] == token:
            return edges[edge, E_TARGET], edge
        edge = edges[edge, E_CHAIN]
    return -1, -1


@njit(nogil=True, cache=True)
def _add_edge(state, token, target, states, edges, buckets, counts):
    if states[state, TARGET] == -1:
        states[state, TOKEN], states[state, TARGET] = token, target
        return
    edge = counts[NUM_EDGES]
    counts[NUM_EDGES] += 1
    at = _bucket(state, token, buckets)
    edges[edge, E_STATE], edges[edge, E_TOKEN], edges[edge, E_TARGET] = state, token, target
    edges[edge, E_NEXT], edges[edge, E_CHAIN] = states[state, EDGES], buckets[at]
    states[state, EDGES] = buckets[at] = edge


@njit(nogil=True, cache=True)
def _new_state(length, link, recent, states, counts):
    state = counts[STATES]
    counts[STATES] += 1
    states[state, LENGTH], states[state, LINK], states[state, RECENT] = length, link, recent
    states[state, TOKEN] = states[state, TARGET] = states[state, EDGES] = -1
    return state


@njit(nogil=True, cache=True)
def _split(above, token, state, states, edges, buckets, counts):
    """A state for the strings of `state` no longer than the way over `above`, taken out of it."""
    clone = _new_state(states[above, LENGTH] + 1, states[state, LINK], states[state, RECENT], states, counts)
    if states[state, TARGET] != -1:
        _add_edge(clone, states[state, TOKEN], states[state, TARGET], states, edges, buckets, counts)
    edge = states[state, EDGES]
    while edge != -1:
        _add_edge(clone, edges[edge, E_TOKEN], edges[edge, E_TARGET], states, edges, buckets, counts)
        edge = edges[edge, E_NEXT]
    states[state, LINK] = clone
    while above != -1:
        target, edge = _find(above, token, states, edges, buckets)
        if target != state:
            break
        if edge == -1:
            states[above, TARGET] = clone
        else:
            edges[edge, E_TARGET] = clone
        above = states[above, LINK]
    return clone


@njit(nogil=True, cache=True)
def empty(states, buckets, counts):
    """Make the automaton of the empty text."""
    buckets[:] = -1
    counts[:] = 0
    counts[ANCHOR] = -1
    counts[LAST] = _new_state(0, -1, -1, states, counts)


@njit(nogil=True, cache=True)
def rehash(edges, buckets, counts):
    """Enter all edges into `buckets` anew, after it was replaced by one of another size."""
    buckets[:] = -1
    for edge in range(counts[NUM_EDGES]):
        at = _bucket(edges[edge, E_STATE], edges[edge, E_TOKEN], buckets)
        edges[edge, E_CHAIN] = buckets[at]
        buckets[at] = edge


@njit(nogil=True, cache=True)
def extend(tokens, text, states, edges, buckets, counts):
    """Append int32 tokens [n] to `text` and its automaton until `text` is full; how many were appended.

    Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text": n > 1 tokens make s <=
    2n - 1 states and at most s + n - 2 edges. All states but the last have an edge, and the first of each is
    kept in `states`: so twice as many `states` as there is `text`, and as many `edges`, are always enough.
    """
    for i in range(tokens.shape[0]):
        token, end, last = tokens[i], counts[TOKENS], counts[LAST]
        if end == text.shape[0]:
            return i
        text[end] = token
        new = _new_state(states[last, LENGTH] + 1, ROOT, end, states, counts)
        above, target = last, -1
        while above != -1:
            target, _ = _find(above, token, states, edges, buckets)
            if target != -1:
                break
            _add_edge(above, token, new, states, edges, buckets, counts)
            above = states[above, LINK]
        if above != -1 and states[target, LENGTH] != states[above, LENGTH] + 1:
            target = _split(above, token, target, states, edges, buckets, counts)
        if above != -1:
            states[new, LINK] = target
        counts[LAST], counts[TOKENS] = new, end + 1
        matched = states[new, LINK]
        counts[MATCH], counts[MATCH_END] = states[matched, LENGTH], states[matched, RECENT]
        for _ in range(REFRESH):
            if matched == ROOT:
                break
            states[matched, RECENT] = end
            matched = states[matched, LINK]
        _follow(text, counts)
    return tokens.shape[0]


@njit(nogil=True, cache=True)
def _follow(text, counts):
    """Keep BESIDE, the last token's place in the original of a copy that was edited.

    ANCHOR is where the copy departed, DEPARTED the tokens since. A token is looked for from ANCHOR on, next
    to where it would be if tokens were only replaced; what is nowhere there replaces.

        original  a b c d e f g h          BESIDE after  x: d   x y: e   x y g: g
        copy      a b c x y g              ANCHOR: c
    """
    end = counts[TOKENS] - 1
    if counts[MATCH] >= COPY:
        counts[ANCHOR] = counts[BESIDE] = counts[MATCH_END]
        counts[DEPARTED] = 0
        return
    counts[DEPARTED] += 1
    if counts[ANCHOR] < 0 or counts[DEPARTED] > PATIENCE:
        counts[ANCHOR] = -1
        return
    anchor, departed = counts[ANCHOR], counts[DEPARTED]
    replaced = anchor + departed
    if departed > 1 and text[counts[BESIDE] + 1] == text[end]:
        counts[BESIDE] += 1
        return
    counts[BESIDE], nearest = min(replaced, end - 1), departed + SKIPPED
    for place in range(anchor + 1, min(replaced + SKIPPED + 1, end)):
        if text[place] == text[end] and abs(place - replaced) < nearest:
            counts[BESIDE], nearest = place, abs(place - replaced)
