"""What a tier below host memory needs: a say when something is cached, and slots to read from and write to.

Such a tier keeps full blocks under the key of their whole prefix (PrefixTree.key, chain_key). It sees host
slots only; how a node comes to one, and back to the device, is the host tier's business.

    keeping   a request ends -> `left`: the step being scheduled may `copy_out` nodes that have no slot
              a step has `ended`: what it has spilled is good. `hold` it, read it, `let_go`

    finding   a request comes with keys that the tree does not have -> `reserve` slots, write to them,
              `insert` the node, `let_go`: from there on it is like any node with slots alone.
              Meanwhile the request is `held`, outside of the scheduler's queue, until `take_in` has it

Slots that are held or reserved are pinned: nothing else is written there, whatever becomes of the node.
All of it is for the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from hetero.batch import Step
from hetero.kv.leaving import spill, take_slot
from hetero.kv.prefix_tree import Node
from hetero.request import Request
from hetero.stats import DiskStats

if TYPE_CHECKING:
    from hetero.kv.manager import KVManager


class Below(Protocol):
    """A tier below, as the KV manager tells it what happens. See KVManager.below."""

    def left(self, node: Node) -> None:
        """A request has left its tokens in the cache: those of `node`, its last full block, and before."""
        ...

    def plan(self, idle: bool) -> None:
        """A step is being scheduled, and all requests have their share: the time for `copy_out`.

        `idle`: there is no request in it.
        """
        ...

    def ended(self, step: Step, good: bool) -> None:
        """A step has ended, and pins nothing any more. Not `good`: nobody knows what is in its slots."""
        ...

    def cleared(self) -> None:
        """Nothing that was cached is trusted any more, slots that are held included."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step of moves alone would be of use now."""
        ...

    @property
    def held(self) -> Sequence[Request]:
        """New requests that wait for this tier."""
        ...

    def hold(self, request: Request) -> bool:
        """Whether a new request should wait, because this tier has more of it than is in memory."""
        ...

    def cancel(self, request_id: str) -> Request | None:
        """Let go of a request that waits; None when it does not."""
        ...

    def take_in(self) -> Sequence[Request]:
        """Take note of what was done in the background. The requests that need not wait any longer."""
        ...

    @property
    def has_more(self) -> bool:
        """Whether something is still to be kept, now or when there is room for it."""
        ...

    def watch(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, from any thread, when `take_in` has something to do."""
        ...

    def wait(self, timeout: float) -> None:
        """Sleep until then, for so many seconds at most."""
        ...

    def stats(self) -> DiskStats:
        """For any thread."""
        ...

    def close(self) -> None:
        """Before the slots' memory goes. Idempotent."""
        ...

    def check_invariants(self) -> None: ...


def copy_out(kv: KVManager, node: Node, evict: bool = False) -> bool:
    """Have the step being scheduled copy a node's blocks to slots, and leave them where they are.

    In the groups where the node has a block, no slot, and what it has is of use. Free slots are taken and
    those of nodes that have their block too; with `evict` also what host memory alone has. Returns whether
    something is copied.
    """
    copied = False
    for g, slots in enumerate(kv.host.slots):
        if not kv.tree.attached(node):
            break  # it was dropped when room was made
        there = slots.num_free or slots.num_spare or evict
        if there and node.blocks[g] is not None and node.slots[g] is None:
            copied = spill(kv, node, g) or copied
    return copied


def hold(kv: KVManager, node: Node) -> dict[int, int]:
    """Pin the slots that an attached node has, by group, but for those that a step in flight writes."""
    held = {
        g: slot
        for g, slot in enumerate(node.slots)
        if slot is not None and not kv.host.is_being_written(g, slot)
    }
    for g, slot in held.items():
        kv.host.slots[g].pin(slot)
    return held


def reserve(kv: KVManager, groups: Iterable[int]) -> dict[int, int] | None:
    """A slot in each of these groups, pinned and nobody's; for it something may leave host memory.

    None where one cannot be had.
    """
    taken: dict[int, int] = {}
    for g in groups:
        slot = take_slot(kv, g)
        if slot is None:
            let_go(kv, taken)
            return None
        taken[g] = slot
    return taken


def let_go(kv: KVManager, slots: Mapping[int, int]) -> None:
    """Unpin what was held or reserved; what is no node's becomes free."""
    for g, slot in slots.items():
        kv.host.slots[g].unpin(slot)


def insert(kv: KVManager, parent: Node, tokens: tuple[int, ...], slots: Mapping[int, int]) -> Node | None:
    """Enter what reserved slots hold as the child of `parent` with these tokens, a full block.

    A child that is there gets the slots it lacks. None where that cannot be: the parent has left the cache,
    or a group without a window has neither block nor slot. The slots stay pinned either way.
    """
    if not kv.tree.attached(parent):
        return None
    node = parent.children.get(tokens)
    if node is None:
        if any(group.window is None and g not in slots for g, group in enumerate(kv.groups)):
            return None
        node = kv.tree.insert(parent, tokens, [None] * len(kv.groups), 0)
        node.below = True
    for g, slot in slots.items():
        if node.slots[g] is None:
            kv.host.slots[g].keep(slot, node)
            node.slots[g] = slot
    return node
