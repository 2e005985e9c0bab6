"""Numba kernels of `spec.store`: a ring of text, and an index of what its places follow.

words    int32 [capacity]  0, or (scope << 20 | token) + 1: equal words are equal tokens of one scope
counts   uint8 [capacity]  how often a word was confirmed where it stands, halved whenever it was contradicted
chain    int32 [capacity]  the previous place in the same bucket of the middle index, plus 1
index    int32 [buckets]   the last place behind which an n-gram ends, plus 1; three tables one after another
state    int64 [2]         where the next word goes, and how many words are held

    segment      0  | c c c c  w w w w w | 0 | w w w w w w | 0  .  .  oldest segment, eaten from the front
                      the context of     ^                   ^
                      a new variant      0 between segments  HEAD, always 0

What an index says is never believed: a place counts only as far as the words before it equal the query's.
"""

from __future__ import annotations

import numpy as np
from numba import njit

TOKEN_BITS = 20
SCOPES = 2**11 - 1  # so that a word fits int32
HEAD, HELD = range(2)  # entries of `state`
STATE = 2
# Entries of a learner's `cursor`: where the last word is known or -1, the next one, words in the open segment
PLACE, NEXT, DEPTH = range(3)
CURSOR = 3

# Entries of a proposer's `cursor`: a place or -1, how many tokens ago the request was there, its context then
ORIGIN, SINCE, CONTEXT = range(3)

SHORT, MIDDLE, LONG = 3, 6, 16  # lengths of indexed n-grams
SAMPLED = 4  # of the long ones one in so many is indexed
LOOK = 48  # words compared at most
COPY, PATIENCE, SKIPPED = 12, 16, 8  # as in `spec.automaton`
CHAIN = 16  # places of one middle n-gram that are compared

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_TOKEN = np.int32((1 << TOKEN_BITS) - 1)


@njit(nogil=True, cache=True)
def word_of(token, scope):
    return np.int32(scope << TOKEN_BITS | token) + np.int32(1)


@njit(nogil=True, cache=True)
def _hash(text, end, length):
    """Of the `length` words before `end`: uint64."""
    value = np.uint64(length)
    for i in range(end - length, end):
        value = (value ^ np.uint64(text[i])) * _MULTIPLIER
        value ^= value >> np.uint64(29)
    return value * _MULTIPLIER


@njit(nogil=True, cache=True)
def _bucket(value, size):
    return np.int64(((value >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32))


@njit(nogil=True, cache=True)
def _sampled(value):
    return value % np.uint64(SAMPLED) == 0


@njit(nogil=True, cache=True)
def tables(buckets):
    """(size of the short table, of the middle one, of the long one) in an index of that many `buckets`."""
    side = buckets // 5
    return side, buckets - 2 * side, side


@njit(nogil=True, cache=True)
def _after(place, words):
    return place + 1 if place + 1 < words.shape[0] else 0


@njit(nogil=True, cache=True)
def _age(place, words, state):
    """How many places were written since this one, itself included; 0 for the gap."""
    age = state[HEAD] - place
    return age if age >= 0 else age + words.shape[0]


@njit(nogil=True, cache=True)
def _candidates(text, end, hint, places, words, chain, index, state):
    """Fill `places` with those that may end as text[:end] does, the likeliest first; how many."""
    short, middle, long = tables(index.shape[0])
    found = 0
    if hint >= 0:
        places[0], found = hint, 1
    if end >= LONG:
        value = _hash(text, end, LONG)
        if _sampled(value):
            places[found] = index[short + middle + _bucket(value, long)] - 1
            found += 1
    if end >= MIDDLE:
        place = np.int64(index[short + _bucket(_hash(text, end, MIDDLE), middle)]) - 1
        age = 0
        for _ in range(CHAIN):
            # Younger than the one before: the place was written over since, and begins another chain.
            if place < 0 or _age(place, words, state) <= age:
                break
            age = _age(place, words, state)
            places[found] = place
            found += 1
            place = np.int64(chain[place]) - 1
    if found == 0 and end >= SHORT:
        places[0], found = index[_bucket(_hash(text, end, SHORT), short)] - 1, 1
    return found


@njit(nogil=True, cache=True)
def lookup(text, end, hint, words, counts, chain, index, state):
    """(place, words equal before it): the best place to go on from after text[:end]; (-1, 0) for none.

    The longest match of up to LOOK words wins, then the higher count of what follows. A new variant's segment
    begins with LONG words of context, and beyond them nothing is known of it: it ranks as high as the text it
    is a variant of. `text`: int32 words of one scope. `hint`: a place that may well be it, or -1.
    """
    places = np.empty(CHAIN + 2, np.int64)
    best, best_length, best_rank, best_count = -1, 0, SHORT - 1, 255
    for i in range(_candidates(text, end, hint, places, words, chain, index, state)):
        place = places[i]
        if place < 0 or words[_after(place, words)] == 0:
            continue
        length, limit, at = 0, min(end, LOOK), place
        while length < limit and words[at] == text[end - 1 - length]:
            length += 1
            at = at - 1 if at else words.shape[0] - 1
        rank = LOOK if length >= LONG and words[at] == 0 else length
        count = counts[_after(place, words)]
        if rank > best_rank or (rank == best_rank and count > best_count):
            best, best_length, best_rank, best_count = place, length, rank, count
    return best, best_length


@njit(nogil=True, cache=True)
def _beside(text, end, place, since, words):
    """Of an edited copy: (place in the original of its last word or -1, words since it departed).

    `place` is where the copy was `since` words ago. As `automaton._follow`: a word is looked for from where
    the copy departed on, next to where it would be if words were only replaced; what is not there replaces.
    """
    first = end - since
    while first < end and words[_after(place, words)] == text[first]:
        place = _after(place, words)
        first += 1
    if end - first > PATIENCE:
        return -1, end - first
    anchor = place
    for i in range(first, end):
        if i > first and words[_after(place, words)] == text[i]:
            place = _after(place, words)
            continue
        replaced = i - first + 1
        at, nearest, place = anchor, replaced + SKIPPED, -1
        for distance in range(1, replaced + SKIPPED + 1):
            at = _after(at, words)
            if words[at] == 0:
                break
            if words[at] == text[i] and abs(distance - replaced) < nearest:
                place, nearest = at, abs(distance - replaced)
            elif distance == replaced and nearest == replaced + SKIPPED:
                place = at
        if place < 0:
            break
    return place, end - first


@njit(nogil=True, cache=True)
def propose(tokens, scope, cursor, text, draft, words, counts, chain, index, state):
    """Fill int32 `draft` [max_tokens] with what likely follows int32 `tokens` [n].

    Returns (tokens drafted, words of context). `cursor`: int64 [3], see ORIGIN; kept from call to call.
    `text`: int32 [LOOK + max_tokens], to work in. A token that no vocabulary has ends the context.
    """
    end = 0
    for i in range(max(0, tokens.shape[0] - LOOK), tokens.shape[0]):
        if tokens[i] < 0 or tokens[i] > _TOKEN:
            end = 0
        else:
            text[end] = word_of(tokens[i], scope)
            end += 1
    beside, departed = -1, 0
    origin = cursor[ORIGIN]
    if origin >= 0 and cursor[SINCE] <= end and (words[origin] - 1) >> TOKEN_BITS == scope:
        beside, departed = _beside(text, end, origin, cursor[SINCE], words)
    place, context = lookup(text, end, -1 if departed else beside, words, counts, chain, index, state)
    if context >= COPY or beside < 0 or (departed and cursor[CONTEXT] < COPY):
        cursor[ORIGIN], cursor[SINCE], cursor[CONTEXT] = place, 0, context
    elif context < SHORT and cursor[CONTEXT] >= COPY:
        place, context = beside, SHORT
    drafted = 0
    while place >= 0 and drafted < draft.shape[0]:
        following = _after(place, words)
        if words[following] == 0 or (drafted and counts[following] == 0):
            # The segment ends here, or went on differently since.
            place, length = lookup(text, end, place, words, counts, chain, index, state)
            if length < MIDDLE:
                break
            following = _after(place, words)
        text[end] = words[following]
        draft[drafted] = (words[following] - 1) & _TOKEN
        place, end, drafted = following, end + 1, drafted + 1
    return drafted, context if drafted else 0


@njit(nogil=True, cache=True)
def _write(word, count, words, counts, state):
    place = state[HEAD]
    words[place], counts[place] = word, count
    head = _after(place, words)
    state[HELD] += (word != 0) - np.int64(words[head] != 0)
    words[head] = 0
    state[HEAD] = head


@njit(nogil=True, cache=True)
def _enter(text, end, depth, place, chain, index):
    """Index `place`, where text[:end] ends; `depth` of its words are in the segment."""
    short, middle, long = tables(index.shape[0])
    if depth >= SHORT:
        index[_bucket(_hash(text, end, SHORT), short)] = place + 1
    if depth >= MIDDLE:
        at = short + _bucket(_hash(text, end, MIDDLE), middle)
        chain[place], index[at] = index[at], place + 1
    if depth >= LONG:
        value = _hash(text, end, LONG)
        if _sampled(value):
            index[short + middle + _bucket(value, long)] = place + 1


@njit(nogil=True, cache=True)
def _append(text, i, depth, words, counts, chain, index, state):
    """Write text[i] behind the `depth` words of the open segment."""
    if depth:
        last = (state[HEAD] if state[HEAD] else words.shape[0]) - 1
        _enter(text, i, depth, last, chain, index)
    _write(text[i], 1, words, counts, state)


@njit(nogil=True, cache=True)
def _stays(place, words, state):
    """Not in the oldest quarter of the ring, which is written anew when it is seen again."""
    return 4 * _age(place, words, state) < 3 * words.shape[0]


@njit(nogil=True, cache=True)
def _open_segment(text, i, fresh, words, counts, chain, index, state):
    """Begin a segment with text[i] and what leads to it; words before it. `fresh`: none of them is known."""
    first = 0 if fresh else max(0, i - LONG)
    _write(0, 0, words, counts, state)
    for j in range(first, i + 1):
        if fresh or j == i:
            _append(text, j, j - first, words, counts, chain, index, state)
        else:
            _write(text[j], 0, words, counts, state)
    return i - first


@njit(nogil=True, cache=True)
def _confirm(place, counts):
    if counts[place] < 255:
        counts[place] += 1


@njit(nogil=True, cache=True)
def learn(text, stop, cursor, words, counts, chain, index, state):
    """Learn text[cursor[NEXT] : stop] of int32 words [n], all of one scope; a call goes on where one stopped.

    Known text is followed and confirmed. Where it departs from all that is known, a segment begins, with LONG
    words of context; it ends when the text is known again.
    """
    place, depth = cursor[PLACE], cursor[DEPTH]
    for i in range(cursor[NEXT], stop):
        if place >= 0:
            following = _after(place, words)
            if words[following] == text[i] and _stays(following, words, state):
                place = following
                _confirm(place, counts)
                continue
            if words[following] != text[i]:
                counts[following] >>= 1
        elif depth == 0 and i + 1 < min(LONG, text.shape[0]):
            continue  # too little to know whether it is known
        elif depth > 0:
            _append(text, i, depth, words, counts, chain, index, state)
            depth += 1
            # The index has the long n-gram of one place in SAMPLED; what it lacks is found now and then.
            if depth <= LONG or not (_sampled(_hash(text, i + 1, LONG)) or depth % 32 == 0):
                continue
        fresh = place < 0
        place, length = lookup(text, i + 1, -1, words, counts, chain, index, state)
        if length >= LONG and _stays(place, words, state):
            _confirm(place, counts)
            depth = 0
            continue
        place = -1
        if depth == 0:
            depth = _open_segment(text, i, fresh, words, counts, chain, index, state) + 1
    cursor[PLACE], cursor[NEXT], cursor[DEPTH] = place, stop, depth


@njit(nogil=True, cache=True)
def index_all(words, counts, chain, index, state):
    """Make the index of words[: state[HEAD]], which begin with a segment; as if they had been learned so."""
    depth = 0
    for place in range(state[HEAD]):
        depth = depth + 1 if words[place] != 0 else 0
        state[HELD] += depth > 0
        context = depth < LONG and counts[place] == 0
        if depth and not context and words[place + 1] != 0:
            _enter(words, place + 1, depth, place, chain, index)


@njit(nogil=True, cache=True)
def forget(scope, words, state):
    """Remove all text of a scope."""
    for place in range(words.shape[0]):
        if words[place] != 0 and (words[place] - 1) >> TOKEN_BITS == scope:
            words[place] = 0
            state[HELD] -= 1
