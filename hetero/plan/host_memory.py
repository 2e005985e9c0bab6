"""How many blocks of the KV cache have room in host memory, beside the devices' pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from backends.base import BLOCK_SIZE
from hetero.kv.groups import KVGroup
from hetero.plan.devices import DeviceChoice
from hetero.plan.planner import SHARE, ModelFacts, Plan
from hetero.settings import OFF
from hetero.sizes import format_size

WRITTEN_BEHIND = 64  # blocks, beside a context that comes from the disk
NO_STATES = "states of recurrent layers stay on their devices, and contexts with them"
SPARE = 0.9  # of the free memory, the most that may be promised


@dataclass(frozen=True, slots=True)
class HostPlan:
    """`slots[g]` blocks of KV group g, each of `block_bytes[g]` in all stages together.

    `why` there are so many. `short_by` bytes of main memory are missing for what was asked for.
    """

    slots: tuple[int, ...]
    block_bytes: tuple[int, ...]
    why: str
    short_by: int = 0

    @property
    def nbytes(self) -> int:
        return sum(count * size for count, size in zip(self.slots, self.block_bytes, strict=True))

    @property
    def tokens(self) -> int:
        """Tokens of contexts of full length that have room."""
        return BLOCK_SIZE * self.slots[0]


def block_bytes(facts: ModelFacts, plan: Plan) -> tuple[int, ...]:
    """Per KV group, bytes of a block: 16 tokens of its layers, each in the format of the layer's stage."""
    sizes = [0] * len(plan.groups)
    for stage in plan.stages:
        plain = stage.kv_types != facts.kv_types
        tokens = facts.plain_kv_bytes_per_token if plain else facts.kv_bytes_per_token
        for g, group in enumerate(plan.groups):
            held = (layer for layer in group.layers if stage.layers[0] <= layer < stage.layers[1])
            sizes[g] += BLOCK_SIZE * sum(tokens[layer] for layer in held)
    return tuple(sizes)


def plan_host(
    ram_cache: int,
    facts: ModelFacts,
    plan: Plan,
    choices: Sequence[DeviceChoice],
    free_bytes: int,
    disk: bool = False,
) -> HostPlan:
    """Slots for `ram_cache` bytes: 0 decides, OFF is none. `free_bytes` of main memory, before the stages.

    Decided: a quarter of what the stages leave, where some stage's pools are in a memory of their own and no
    stage is on another machine. The pools of CPUs are main memory already, and can as well be larger. Groups
    get slots in proportion to their pools.
    A `disk` below needs slots in any case: then there is room for one context, if memory is left for it.
    """
    held = (stage.total_bytes for stage in plan.stages if in_main_memory(choices[stage.index]))
    left = free_bytes - sum(held) - plan.host_bytes
    host = _decide(ram_cache, facts, plan, choices, left)
    if not disk or facts.recurrent or any(host.slots):
        return host
    longest = -(-plan.max_model_len // BLOCK_SIZE)
    fitting = _slots(int(SPARE * max(0, left)), plan.groups, host.block_bytes)
    slots = tuple(
        max(WRITTEN_BEHIND, min(most, min(group.num_blocks, longest) + WRITTEN_BEHIND))
        for group, most in zip(plan.groups, fitting, strict=True)
    )
    return replace(host, slots=slots, why="for what is on its way to the disk, and back")


def _decide(
    ram_cache: int, facts: ModelFacts, plan: Plan, choices: Sequence[DeviceChoice], left: int
) -> HostPlan:
    sizes = block_bytes(facts, plan)
    none = (0,) * len(sizes)
    if facts.recurrent:
        return HostPlan(none, sizes, NO_STATES)
    used = [(stage, choices[stage.index]) for stage in plan.stages]
    if ram_cache == OFF:
        return HostPlan(none, sizes, "--ram-cache off")
    if ram_cache:
        slots = _slots(ram_cache, plan.groups, sizes)
        short = max(0, ram_cache - int(SPARE * max(0, left)))
        return HostPlan(slots, sizes, f"--ram-cache {format_size(ram_cache)}", short)
    if all(in_main_memory(choice) or choice.spec.worker for _, choice in used):
        return HostPlan(none, sizes, "the pools are in main memory already; --ram-cache SIZE adds to them")
    if any(choice.spec.worker for _, choice in used):  # it would refuse more than its machine has left
        return HostPlan(none, sizes, "a worker's main memory is not known here; --ram-cache SIZE takes some")
    share = int(SHARE * max(0, left))
    return HostPlan(_slots(share, plan.groups, sizes), sizes, "a quarter of the main memory that is left")


def _slots(nbytes: int, groups: Sequence[KVGroup], sizes: Sequence[int]) -> tuple[int, ...]:
    pools = sum(group.num_blocks * size for group, size in zip(groups, sizes, strict=True))
    return tuple(nbytes * group.num_blocks // pools for group in groups)


def in_main_memory(choice: DeviceChoice) -> bool:
    """Whether the device's pools are in this machine's main memory."""
    return choice.device.kind in ("cpu", "igpu") and not (choice.spec.endpoint or choice.spec.worker)


def explain_short(host: HostPlan) -> str:
    """One line for the user: what --ram-cache asks for is not there."""
    return (
        f"--ram-cache: {format_size(host.nbytes)} of host memory are asked for, {format_size(host.short_by)} "
        "more than can be used of what is free; lower it, or --kv-memory"
    )
