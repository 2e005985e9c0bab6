"""States of recurrent layers: which of a sequence's are kept, and in which slots.

The group of recurrent layers has slots in place of blocks, in a pool like any group's. A slot holds the
state of all these layers after one token. A request's table has a place for each block of tokens, like
other groups' tables, and at most places nothing:

    tokens   0 .. 15   16 .. 31   32 .. 47   48 .. 60         61 are computed
    table       .         m          b          c             .: SCRATCH_BLOCK
                                                c: the state after the last token, where its next step begins
                                     b: the state at the last border, kept when the request ends
                          m: the state at a border that somebody may begin at (see is_wanted); the tree's

A step overwrites what only its request has: reading comes first, in every layer and head. What the tree has
is never written again, and is not read in the step that writes it. So a request holds two slots, and no
state is ever copied; prefixes are found at borders whose state is there (matching.py), and a tail is
computed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero.batch import StateUse
from hetero.kv.block_pool import SCRATCH_BLOCK
from hetero.kv.leaving import detach
from hetero.request import Request

if TYPE_CHECKING:
    from hetero.kv.cursor import Cursor
    from hetero.kv.manager import KVManager

PER_REQUEST = 2  # slots: where it is, and its last border, or what it begins with and others have too
KEPT_FREE = 4  # one in so many slots is neither for borders nor for marks, but for requests to come
APART_BLOCKS = 128  # blocks of a prompt between states that are kept while slots are free
WORTH_WAITING = 4  # blocks that another request computes now, and this one would compute again


def reserve(kv: KVManager, cursor: Cursor, num_tokens: int, kept: int) -> bool:
    """Slots for the states that the next `num_tokens` tokens leave. False: not even for the last one.

    Leaves `kept` slots for others.
    """
    request, g, size = cursor.request, kv.state_group, kv.block_size
    assert g is not None
    pool, table = kv.pools[g], request.block_tables[g]
    start = request.num_computed_tokens
    if cursor.begins != start:
        cursor.begins, cursor.source = start, table[-1] if start else SCRATCH_BLOCK
    first, last = start // size, (start + num_tokens - 1) // size
    if len(table) > last and table[last] != SCRATCH_BLOCK and first == last:
        return True  # as in most steps of a decode
    border = (start + num_tokens) // size - 1
    own = _own_slots(kv, table, first, border)
    if not own and pool.num_available <= kept:
        return False
    table += [SCRATCH_BLOCK] * (last + 1 - len(table))
    table[last] = own.pop(0) if own else _take(kv)
    if first <= border < last:
        table[border] = own.pop(0) if own else _take(kv) if _has_spare(kv, kept) else SCRATCH_BLOCK
    for i in range(first, last):
        if table[i] == SCRATCH_BLOCK and _is_due(kv, cursor, i, kept):
            table[i] = _take(kv)
    for slot in own:
        pool.release(slot)
    return True


def _own_slots(kv: KVManager, table: list[int], first: int, border: int) -> list[int]:
    """Take from the table what nobody else has and the step may overwrite; the newest first.

    Blocks from `first` on are written by the step. The border before stays unless there will be a new one.
    """
    assert kv.state_group is not None
    pool, own = kv.pools[kv.state_group], []
    low = first if border < first else max(0, first - 1)
    for i in reversed(range(low, len(table))):
        slot = table[i]
        if slot != SCRATCH_BLOCK and pool.ref_counts[slot] == 1 and pool.owner(slot) is None:
            own.append(slot)
            table[i] = SCRATCH_BLOCK
    return own


def _take(kv: KVManager) -> int:
    """A slot, for which the state that was not used for longest may leave the cache. There must be one."""
    g = kv.state_group
    assert g is not None
    slot = kv.pools[g].allocate()
    if slot is None:
        idle = kv.pools[g].oldest_idle()
        assert idle is not None, "the caller checked that a slot is available"
        detach(kv, kv.pools[g].owner(idle), g)
        slot = kv.pools[g].allocate()
        assert slot is not None
    return slot


def _has_spare(kv: KVManager, kept: int) -> bool:
    """Whether a slot can be had for what would be good to keep."""
    assert kv.state_group is not None
    pool = kv.pools[kv.state_group]
    return pool.num_available > max(kept, pool.num_usable // KEPT_FREE)


def _is_due(kv: KVManager, cursor: Cursor, i: int, kept: int) -> bool:
    """Whether the state behind block number `i` gets a slot of its own."""
    assert kv.state_group is not None
    pool = kv.pools[kv.state_group]
    if i in cursor.marks or i == _prompt_end(kv, cursor.request):
        return _has_spare(kv, kept)
    return pool.num_free > kept and _is_periodic(kv, cursor.request, i)


def is_wanted(kv: KVManager, cursor: Cursor, i: int) -> bool:
    """Whether the tree should have the state behind block number `i`, once there is one.

    Where the prompt ends, so that it may come again with another answer or without the answer's thoughts;
    where another request went on differently; and now and then in a long prompt.
    """
    request = cursor.request
    return i in cursor.marks or i == _prompt_end(kv, request) or _is_periodic(kv, request, i)


def _prompt_end(kv: KVManager, request: Request) -> int:
    """The last block that a request with the same prompt can begin behind."""
    return (len(request.prompt_token_ids) - 1) // kv.block_size - 1


def _is_periodic(kv: KVManager, request: Request, i: int) -> bool:
    return (i + 1) % APART_BLOCKS == 0 and i < _prompt_end(kv, request)


def missing(kv: KVManager, request: Request) -> int:
    """Slots that the request needs beside its own: it writes where it is, unless others begin there too."""
    g = kv.state_group
    assert g is not None
    table = request.block_tables[g] if request.block_tables else []
    if not table:
        return 1
    return int(kv.pools[g].owner(table[-1]) is not None or kv.pools[g].ref_counts[table[-1]] > 1)


def use_state(kv: KVManager, cursor: Cursor, num_tokens: int) -> StateUse:
    """What the step computes with that has the next `num_tokens` tokens, for which slots were reserved."""
    request, size = cursor.request, kv.block_size
    assert kv.state_group is not None and cursor.begins == request.num_computed_tokens
    table = request.block_tables[kv.state_group]
    start, end = cursor.begins, cursor.begins + num_tokens
    writes = [
        (min((i + 1) * size, end) - start, table[i])
        for i in range(start // size, len(table))
        if table[i] != SCRATCH_BLOCK
    ]
    assert writes and writes[-1][0] == num_tokens, "the last state has no slot"
    return StateUse(cursor.source, writes)


def trim(kv: KVManager, cursor: Cursor) -> None:
    """Give back what lies before the last border. Steps in flight may still read it: they come first."""
    g = kv.state_group
    assert g is not None
    table = cursor.request.block_tables[g]
    needed = max(0, min(cursor.request.num_computed_tokens // kv.block_size - 1, len(table)))
    for i in range(cursor.held[g], needed):
        if table[i] != SCRATCH_BLOCK:
            kv.pools[g].release(table[i])
            table[i] = SCRATCH_BLOCK
    cursor.held[g] = max(cursor.held[g], needed)


def keep_border(kv: KVManager, cursor: Cursor) -> None:
    """Let the tree have the state at the request's last border; its tokens are committed."""
    g, at = kv.state_group, cursor.request.num_computed_tokens // kv.block_size - 1
    assert g is not None
    node, pool = cursor.node, kv.pools[g]
    if at < 0 or cursor.depth != at + 1 or not kv.tree.attached(node) or node.blocks[g] is not None:
        return
    slot = cursor.request.block_tables[g][at]
    if slot != SCRATCH_BLOCK and pool.owner(slot) is None:
        pool.keep(slot, node)
        node.blocks[g] = slot


def should_wait(kv: KVManager, cursor: Cursor) -> bool:
    """Whether an older request is about to compute what this one, not begun yet, begins with.

    It is asked to leave its state where the two part.
    """
    request, size = cursor.request, kv.block_size
    if cursor.begins >= 0:
        return False
    most = (request.num_tokens - 1) // size
    done = request.num_computed_tokens // size
    for other in kv.cursors_before(cursor):
        ahead = other.request
        if other.root is cursor.root and ahead.num_computed_tokens < len(ahead.prompt_token_ids):
            border = min(most, _common_tokens(request, ahead) // size)
            if border - done >= WORTH_WAITING and ahead.num_computed_tokens < border * size:
                other.marks.add(border - 1)
                return True
    return False


def _common_tokens(a: Request, b: Request) -> int:
    """Equal tokens at the beginning of two prompts; bisection, since lists compare quickly."""
    one, two = a.prompt_token_ids, b.prompt_token_ids
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == two[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def check_states(kv: KVManager, cursor: Cursor) -> None:
    """Raise AssertionError unless a request's states are where its tokens say."""
    g, size, request = kv.state_group, kv.block_size, cursor.request
    assert g is not None
    table, done = request.block_tables[g], request.num_computed_tokens
    assert len(table) >= kv.num_blocks(done)
    assert not done or table[(done - 1) // size] != SCRATCH_BLOCK, "the last state has no slot"
    assert not any(table[: cursor.held[g]]), "a state before the last border is held"
    if done % size:
        slot = table[done // size]
        assert kv.pools[g].owner(slot) is None and kv.pools[g].ref_counts[slot] == 1, "not its own state"
