"""A device that knows what every KV slot holds: the hash of the prefix whose last token is there."""

from __future__ import annotations

import numpy as np

from hetero.batch import Batch, Step
from hetero.kv.groups import KVGroup
from hetero.request import Request

MASK = 2**62 - 1
EOS_EVERY = 37


def first_hash(scope: str) -> int:
    """The hash before the first token: nothing of one scope passes for another's."""
    return 1 + len(scope)


def extend_hash(h: int, token: int) -> int:
    """The hash of a prefix with one more token: what that token's KV is a function of."""
    h = (h * 6364136223846793005 + token * 1442695040888963407 + 1) & MASK
    return h ^ (h >> 29)


def next_token(last_hash: int) -> int:
    return last_hash % 5


def is_eos(last_hash: int) -> bool:
    return last_hash % EOS_EVERY == 0


class Device:
    """KV content per group, block and offset, as prefix hashes; 0 is garbage. Host slots likewise.

    A state is the hash of the prefix behind which it is.
    """

    def __init__(self, groups: list[KVGroup], block_size: int, host_slots: list[int]):
        self.groups, self.block_size = groups, block_size
        self.slots = [np.zeros(g.num_blocks * block_size, np.int64) for g in groups]
        self.host = [np.zeros((n, block_size), np.int64) for n in host_slots]
        self._hashes: dict[str, np.ndarray] = {}

    def hashes(self, request: Request, end: int) -> np.ndarray:
        """Hashes of the first `end` prefixes of a request's own tokens, int64 [end]."""
        known = self._hashes.get(request.request_id, np.zeros(0, np.int64))
        if len(known) < end:
            more, h = [], int(known[-1]) if len(known) else first_hash(request.cache_scope)
            for token in request.token_ids(len(known), end):
                h = extend_hash(h, token)
                more.append(h)
            known = self._hashes[request.request_id] = np.concatenate([known, np.array(more, np.int64)])
        return known[:end]

    def run(self, step: Step, batch: Batch, broken: bool) -> list[int]:
        """Compute a step as a stage does: spills, copies, all stores, then attention. Returns the prefix
        hash behind each logits row.

        What is loaded is there only when all of that is over, as late as a stage may be; until then the
        block holds garbage, and nothing else may write there.
        """
        size = self.block_size
        for move in batch.spills:
            block = self.slots[move.group][move.block * size : (move.block + 1) * size]
            self.host[move.group][move.slot] = 0 if broken else block
        self._copy(batch, broken)
        for move in batch.loads:
            self.slots[move.group][move.block * size : (move.block + 1) * size] = 0
        loading = {(move.group, move.block) for move in batch.loads}
        assert len(loading) == len(batch.loads), "two loads into one block"
        hashes = self._compute(step, batch, broken) if step.requests else []
        for move in batch.loads:
            block = self.slots[move.group][move.block * size : (move.block + 1) * size]
            assert not block.any(), "a block is written while it is loaded"
            block[:] = 0 if broken else self.host[move.group][move.slot]
        return hashes

    def _copy(self, batch: Batch, broken: bool) -> None:
        size = self.block_size
        for copy in batch.copies:
            slots = self.slots[copy.group]
            source = 0 if broken else slots[copy.src * size : (copy.src + 1) * size].copy()
            slots[copy.dst * size : (copy.dst + 1) * size] = source

    def _compute(self, step: Step, batch: Batch, broken: bool) -> list[int]:
        size = self.block_size
        hashes = []
        for request, end, draft in zip(step.requests, batch.context_lens.tolist(), step.drafts, strict=True):
            known = self.hashes(request, end - len(draft))
            h, guessed = int(known[-1]), []
            for token in draft:
                h = extend_hash(h, token)
                guessed.append(h)
            hashes.append(np.concatenate([known, np.array(guessed, np.int64)]))
        counts = step.num_scheduled_tokens
        values = np.concatenate([h[-n:] for h, n in zip(hashes, counts, strict=True)])
        for g, slots in enumerate(self.slots):
            if self.groups[g].recurrent:
                self._use_states(slots, batch, hashes, counts, broken)
                continue
            mapping = batch.slot_mapping[g]
            assert mapping.min() >= size, "a token goes to the scratch block"
            assert len(set(mapping.tolist())) == len(mapping), "two tokens share a slot"
            slots[mapping] = 0 if broken else values
        if broken:
            return [0] * len(batch.logits_rows)
        for g, group in enumerate(self.groups):
            if group.recurrent:
                continue
            for i, expected in enumerate(hashes):
                first = group.first_needed(len(expected) - counts[i])
                at = np.arange(first, len(expected))
                got = self.slots[g][batch.block_tables[g][i, at // size] * size + at % size]
                assert (got == expected[first:]).all(), f"{step.requests[i].request_id} attends foreign KV"
        return values[batch.logits_rows].tolist()

    def _use_states(
        self, slots: np.ndarray, batch: Batch, hashes: list[np.ndarray], counts: list[int], broken: bool
    ) -> None:
        """All sequences begin at once: what one of them writes, no other may read or write in this step."""
        size = self.block_size
        sources, writes = batch.state_sources.tolist(), batch.state_writes.tolist()
        starts = [len(known) - count for known, count in zip(hashes, counts, strict=True)]
        for i, (source, start) in enumerate(zip(sources, starts, strict=True)):
            assert (source == 0) == (start == 0), "a state before the first token, or none after it"
            assert not start or broken or slots[source * size] == hashes[i][start - 1], "a foreign state"
        for i, _, slot in writes:
            users = {j for j, source in enumerate(sources) if source == slot}
            users |= {j for j, _, other in writes if other == slot}
            assert slot > 0 and users == {i}, "two sequences at one state"
        for i, rows, slot in writes:
            assert 0 < rows <= counts[i]
            slots[slot * size] = 0 if broken else hashes[i][starts[i] + rows - 1]
        assert writes == sorted(writes) and {i for i, _, _ in writes} == set(range(len(starts)))
