"""The slots of host memory: who has them, and which is given up next."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetero.kv.host_tier import SlotPool
from hetero.kv.prefix_tree import Node


class SlotMachine(RuleBasedStateMachine):
    """A pool of slots beside plain dictionaries."""

    @initialize(num_slots=st.integers(0, 6))
    def start(self, num_slots: int) -> None:
        self.pool = SlotPool(num_slots)
        self.pins: dict[int, int] = {}
        self.owners: dict[int, Node] = {}
        self.idle: list[int] = []  # a node's and not pinned, the oldest first

    @rule()
    def take(self) -> None:
        slot = self.pool.take()
        used = set(self.pins) | set(self.idle)
        assert (slot is None) == (len(used) == self.pool.num_slots)
        if slot is not None:
            assert slot not in used
            self.pins[slot] = 1

    @precondition(lambda self: set(self.pins) - set(self.owners))
    @rule(data=st.data(), block=st.none() | st.just(7))
    def keep(self, data: st.DataObject, block: int | None) -> None:
        slot = data.draw(st.sampled_from(sorted(set(self.pins) - set(self.owners))))
        self.owners[slot] = Node((1,), [block], None, 0)
        self.pool.keep(slot, self.owners[slot])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.owners)))
        self.pool.forget(slot)
        del self.owners[slot]
        if slot in self.idle:
            self.idle.remove(slot)

    @precondition(lambda self: self.pins or self.idle)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted([*self.pins, *self.idle])))
        self.pool.pin(slot)
        self.pins[slot] = self.pins.get(slot, 0) + 1
        if slot in self.idle:
            self.idle.remove(slot)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.pins)))
        self.pool.unpin(slot)
        self.pins[slot] -= 1
        if not self.pins[slot]:
            del self.pins[slot]
            if slot in self.owners:
                self.idle.append(slot)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), block=st.none() | st.just(7))
    def the_block_comes_or_goes(self, data: st.DataObject, block: int | None) -> None:
        slot = data.draw(st.sampled_from(sorted(self.owners)))
        self.owners[slot].blocks[0] = block
        self.pool.refile(slot)
        if slot in self.idle:
            self.idle.remove(slot)
            self.idle.append(slot)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        assert self.pool.num_free == self.pool.num_slots - len(self.pins) - len(self.idle)
        spare = [slot for slot in self.idle if self.owners[slot].blocks[0] is not None]
        assert self.pool.num_spare == len(spare)
        assert self.pool.oldest() == next(iter(spare + self.idle), None)
        for slot in range(self.pool.num_slots):
            assert self.pool.owner(slot) is self.owners.get(slot)
            assert self.pool.pins[slot] == self.pins.get(slot, 0)


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_misuse_of_slots_is_an_error() -> None:
    pool = SlotPool(2)
    slot = pool.take()
    assert slot is not None
    pool.keep(slot, Node((1,), [None], None, 0))
    pool.unpin(slot)
    for wrong in (lambda: pool.unpin(slot), lambda: pool.forget(1 - slot), lambda: pool.keep(1 - slot, None)):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(KeyError):
        pool.pin(1 - slot)
