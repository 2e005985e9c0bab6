"""The memory map: which layers, how many KV blocks and what else goes to a device, and whether it fits.

Pure: numbers in, numbers and reasons out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.config import format_size
from hetero.kv.groups import KVGroup

BLOCK_SIZE = 16
SHARE = 0.25  # of the free memory, for the KV cache that nobody sized
SPARE = 0.9  # of the free memory, the most that a plan may use
MIN_CONTEXT = 2048  # tokens; a smaller cache than this is refused rather than chosen
WINDOW_ROOM = 2  # windowed pools are this many times what the running requests need, for cached tails


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the plan needs to know of a model.

    `layer_windows[i]` and `kv_bytes_per_token[i]` (K and V of one token, bytes) are of layer i.
    `weight_bytes` is what the device holds of the file, `compute_bytes` what a step's graph needs.
    """

    n_ctx_train: int
    layer_windows: tuple[int | None, ...]
    kv_bytes_per_token: tuple[int, ...]
    weight_bytes: int
    compute_bytes: int

    @property
    def n_layer(self) -> int:
        return len(self.layer_windows)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user asked for; 0 means "decide for me"."""

    ctx: int = 0
    kv_memory: int = 0
    kv_tokens: int = 0
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One device's share: layers [first, last), and the bytes that it holds."""

    device: str
    layers: tuple[int, int]
    weight_bytes: int
    kv_bytes: int
    compute_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.compute_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """A memory map. `short_by_bytes` > 0 exactly when it does not fit.

    `kv_tokens` is how many tokens a cache without windows holds: the sum of the contexts that can be
    kept at the same time. `max_model_len` is the longest context of one request. `reasons` explain the
    sizes, `notes` say where the user gets less than asked for.
    """

    stages: tuple[StagePlan, ...]
    groups: tuple[KVGroup, ...]
    kv_tokens: int
    max_model_len: int
    free_bytes: int
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    short_by_bytes: int

    @property
    def fits(self) -> bool:
        return self.short_by_bytes == 0

    @property
    def total_bytes(self) -> int:
        return sum(stage.total_bytes for stage in self.stages)


def kv_groups(
    layer_windows: Sequence[int | None],
    kv_tokens: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int = BLOCK_SIZE,
) -> tuple[KVGroup, ...]:
    """Layers by attention span, full attention first, with the blocks that `kv_tokens` tokens need.

    Block 0 of each pool is a scratch block on top. A windowed group never holds more than what its
    running requests can attend, twice over, so that tails of finished requests stay reusable.
    """
    windows = sorted(set(layer_windows), key=lambda w: (w is not None, w or 0))
    groups = []
    for window in windows:
        tokens = kv_tokens
        if window is not None:
            live = max_num_seqs * (window + 2 * block_size) + max_num_batched_tokens
            tokens = min(kv_tokens, WINDOW_ROOM * live)
        layers = tuple(i for i, w in enumerate(layer_windows) if w == window)
        groups.append(KVGroup(layers, window, 1 + -(-tokens // block_size)))
    return tuple(groups)


def kv_bytes(groups: Sequence[KVGroup], bytes_per_token: Sequence[int], block_size: int = BLOCK_SIZE) -> int:
    """Bytes of all pools: blocks x tokens in a block x bytes of a token in the group's layers."""
    return sum(g.num_blocks * block_size * sum(bytes_per_token[i] for i in g.layers) for g in groups)


def make_plan(facts: ModelFacts, device: str, free_bytes: int, limits: Limits) -> Plan:
    """The memory map of a model on one device with `free_bytes` bytes to give."""
    context = min(limits.ctx or facts.n_ctx_train, facts.n_ctx_train)
    fixed = facts.weight_bytes + facts.compute_bytes
    room = max(0, int(free_bytes * SPARE) - fixed)
    tokens, reasons = _choose_tokens(facts, limits, context, int(free_bytes * SHARE), room)
    notes = []
    if limits.ctx > facts.n_ctx_train:
        notes.append(f"--ctx {limits.ctx} is more than the model was trained for: {facts.n_ctx_train}")
    if tokens < context:
        notes.append(
            f"requests are limited to the {tokens} tokens of the KV cache; the model could {context}"
        )
    groups = _groups(facts, limits, tokens)
    used = kv_bytes(groups, facts.kv_bytes_per_token)
    stage = StagePlan(device, (0, facts.n_layer), facts.weight_bytes, used, facts.compute_bytes)
    return Plan(
        stages=(stage,),
        groups=groups,
        kv_tokens=tokens,
        max_model_len=min(context, tokens),
        free_bytes=free_bytes,
        reasons=tuple(reasons),
        notes=tuple(notes),
        short_by_bytes=max(0, stage.total_bytes - int(free_bytes * SPARE)),
    )


def explain_shortage(plan: Plan, facts: ModelFacts) -> str:
    """One line for the user: how much is missing and what to change."""
    change = "free some memory"
    if facts.weight_bytes + facts.compute_bytes < plan.free_bytes * SPARE:
        change = "lower --kv-tokens, --kv-memory or --ctx, or free some memory"
    return (
        f"not enough memory on {plan.stages[0].device}: the plan needs {plan.total_bytes} bytes "
        f"({format_size(plan.total_bytes)}), {plan.short_by_bytes} bytes more than can be used of the "
        f"{format_size(plan.free_bytes)} that are free; {change}"
    )


def _choose_tokens(
    facts: ModelFacts, limits: Limits, context: int, share: int, room: int
) -> tuple[int, list[str]]:
    """Tokens in the cache, a multiple of the block size, and why."""
    if limits.kv_tokens:
        return _round_up(limits.kv_tokens), ["KV cache: as many tokens as --kv-tokens says"]
    most = _round_up(limits.max_num_seqs * context)
    if limits.kv_memory:
        tokens = max(BLOCK_SIZE, _tokens_in(facts, limits, limits.kv_memory, most))
        if tokens >= most:
            return most, [f"KV cache: {limits.max_num_seqs} requests of {context} tokens; more is never used"]
        return tokens, [f"KV cache: what fits in --kv-memory ({format_size(limits.kv_memory)})"]
    least = _round_up(context if limits.ctx else min(context, MIN_CONTEXT))
    tokens = _tokens_in(facts, limits, min(share, room), most)
    if tokens >= most:
        return most, [f"KV cache: {limits.max_num_seqs} requests of {context} tokens"]
    if tokens >= least:
        return tokens, [f"KV cache: a quarter of the free memory ({format_size(share)})"]
    return least, [f"KV cache: the least that is useful, {least} tokens"]


def _tokens_in(facts: ModelFacts, limits: Limits, budget: int, most: int) -> int:
    """The largest multiple of the block size, up to `most`, whose pools take at most `budget` bytes."""
    low, high = 0, most // BLOCK_SIZE
    while low < high:
        middle = (low + high + 1) // 2
        groups = _groups(facts, limits, middle * BLOCK_SIZE)
        if kv_bytes(groups, facts.kv_bytes_per_token) <= budget:
            low = middle
        else:
            high = middle - 1
    return low * BLOCK_SIZE


def _groups(facts: ModelFacts, limits: Limits, tokens: int) -> tuple[KVGroup, ...]:
    return kv_groups(facts.layer_windows, tokens, limits.max_num_seqs, limits.max_num_batched_tokens)


def _round_up(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE
