"""The memory map: which layers, how many KV blocks and what else goes to a device, and whether it fits.

Pure: numbers in, numbers and reasons out. Which layers go where is decided in split.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from backends.base import BLOCK_SIZE, RECURRENT
from backends.ggml.attention_layout import GATHERED
from hetero.kv.groups import KVGroup
from hetero.kv_types import F16, KVTypes
from hetero.plan.sizes import Limits, ModelFacts, Place
from hetero.sizes import format_size

SHARE = 0.25  # of a memory that programs share, for the KV cache that nobody sized
STATE_TOKENS = 2048  # of the KV cache, for each state of recurrent layers that is kept
GATHERED_STATES = 4  # copies of a request's state in a layer that a step's graph holds, where it gathers them
REQUEST_TOKENS = 1024  # likewise for each that a request has for itself
LEAST_STATES = 4
MOST_GAINED = 4  # times the tokens that another format may hold in the same memory; they take 1 to 2 bytes
WINDOW_ROOM = 2  # windowed pools are this many times what the running requests need, for cached tails


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One device's share: layers [first, last), and the bytes that it holds.

    `index` is the device's position among those that were chosen. `seconds` is what a step of one
    micro-batch of decoding is predicted to take, `reason` why the stage ends where it does. `kv_types` is
    what the KV cache is kept in there.
    """

    device: str
    layers: tuple[int, int]
    weight_bytes: int
    kv_bytes: int
    compute_bytes: int
    free_bytes: int = 0
    index: int = 0
    seconds: float | None = None
    reason: str = ""
    kv_types: KVTypes = F16

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.compute_bytes

    @property
    def what(self) -> str:
        """The layers, for people."""
        first, last = self.layers
        return f"layers {first} to {last - 1}" if last - first > 1 else f"layer {first}"


@dataclass(frozen=True, slots=True)
class Shortage:
    """`nbytes` are missing on these devices, which share one memory."""

    devices: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class FormatSize:
    """A format of the KV cache: how many tokens the planned pools' memory would hold in it, and how many
    bytes the planned number of blocks would take.
    """

    name: str
    tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A memory map. It fits exactly when there is no shortage.

    `kv_tokens` is how many tokens a cache without windows holds: the sum of the contexts that can be
    kept at the same time. `max_model_len` is the longest context of one request. `reasons` explain the
    sizes, `notes` say where the user gets less than asked for. `free_bytes` is of all memories used.
    `fitting_tokens` is the largest KV cache that these stages have room for, 0 for none at all.
    `formats`: what each format of the KV cache that can be chosen would make of the same memory. The experts
    of `host_experts` layers take `host_bytes` of main memory, and are in no stage's weights.
    """

    stages: tuple[StagePlan, ...]
    groups: tuple[KVGroup, ...]
    kv_tokens: int
    max_model_len: int
    free_bytes: int
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    shortages: tuple[Shortage, ...]
    fitting_tokens: int
    formats: tuple[FormatSize, ...] = ()
    host_experts: int = 0
    host_bytes: int = 0

    @property
    def fits(self) -> bool:
        return not self.shortages

    @property
    def short_by_bytes(self) -> int:
        return sum(s.nbytes for s in self.shortages)

    @property
    def total_bytes(self) -> int:
        return sum(stage.total_bytes for stage in self.stages) + self.host_bytes


Cut = tuple[int, int, int]  # index of the place, first layer, last layer + 1


def kv_groups(
    layer_windows: Sequence[int | None],
    kv_tokens: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int = BLOCK_SIZE,
) -> tuple[KVGroup, ...]:
    """Layers by attention span, full attention first, with the blocks that `kv_tokens` tokens need; at last
    recurrent ones with states for as many requests as these tokens are likely to serve.

    Block 0 of each pool is a scratch block on top. A windowed group never holds more than what its
    running requests can attend, twice over, so that tails of finished requests stay reusable.
    """
    windows = sorted(set(layer_windows), key=lambda w: (w == RECURRENT, w is not None, w or 0))
    groups = []
    for window in windows:
        layers = tuple(i for i, w in enumerate(layer_windows) if w == window)
        if window == RECURRENT:
            groups.append(KVGroup(layers, 0, 1 + num_states(kv_tokens, max_num_seqs), recurrent=True))
            continue
        tokens = kv_tokens
        if window is not None:
            live = max_num_seqs * (window + 2 * block_size) + max_num_batched_tokens
            tokens = min(kv_tokens, WINDOW_ROOM * live)
        groups.append(KVGroup(layers, window, 1 + -(-tokens // block_size)))
    return tuple(groups)


def num_states(kv_tokens: int, max_num_seqs: int) -> int:
    """States of recurrent layers beside a KV cache of so many tokens: for its requests, and for what others
    may begin with. A state takes as much memory as the keys and values of some 2,000 tokens.
    """
    running = min(max_num_seqs, kv_tokens // REQUEST_TOKENS)
    return max(LEAST_STATES, running + min(2 * max_num_seqs, kv_tokens // STATE_TOKENS))


def kv_bytes(groups: Sequence[KVGroup], bytes_per_token: Sequence[int], block_size: int = BLOCK_SIZE) -> int:
    """Bytes of all pools: blocks x tokens in a block x bytes of a token in the group's layers."""
    return sum(g.num_blocks * block_size * sum(bytes_per_token[i] for i in g.layers) for g in groups)


def layer_kv_bytes(facts: ModelFacts, limits: Limits, tokens: int, places: Iterable[Place]) -> list[int]:
    """Bytes of each layer's pools when the KV cache holds `tokens` tokens: the most on any of `places`."""
    kinds = [facts.token_bytes(plain) for plain in {place.gathers for place in places}]
    sizes = [0] * facts.n_layer
    for group in _groups(facts, limits, tokens):
        for layer in group.layers:
            if group.recurrent:
                sizes[layer] = group.num_blocks * facts.state_bytes
            else:
                sizes[layer] = group.num_blocks * BLOCK_SIZE * max(kind[layer] for kind in kinds)
    return sizes


def tokens_of_memory(facts: ModelFacts, limits: Limits, places: Sequence[Place]) -> int:
    """Tokens in a KV cache of --kv-memory bytes over all devices, but none that are never used."""
    most = limits.most_tokens(facts)
    tokens = _most_tokens(most, lambda n: sum(layer_kv_bytes(facts, limits, n, places)) <= limits.kv_memory)
    return max(BLOCK_SIZE, tokens)


def format_size_of(
    name: str, plan: Plan, facts: ModelFacts, limits: Limits, places: Sequence[Place]
) -> FormatSize:
    """What `facts`, of the same model with its KV cache in another format, would make of a plan's memory."""

    def sizes(tokens: int) -> list[int]:
        found = []
        for stage in plan.stages:
            layers = layer_kv_bytes(facts, limits, tokens, [places[stage.index]])
            found.append(sum(layers[slice(*stage.layers)]))
        return found

    def fits(tokens: int) -> bool:
        return all(size <= s.kv_bytes for size, s in zip(sizes(tokens), plan.stages, strict=True))

    most = _most_tokens(MOST_GAINED * plan.kv_tokens, fits)
    return FormatSize(name, most, sum(sizes(plan.kv_tokens)))


def stage_compute_bytes(facts: ModelFacts, limits: Limits, place: Place, last: bool, num_stages: int) -> int:
    """Bytes of a stage's graph, and of the results that several stages keep for steps in flight."""
    graph = facts.compute_bytes + (facts.logits_bytes if last else 0)
    if num_stages == 1 or not place.shared:
        return graph
    return graph + ((limits.pipeline_depth or num_stages) + 1) * (
        facts.logits_bytes if last else facts.rows_bytes
    )


def make_plan(facts: ModelFacts, places: Sequence[Place], cuts: Sequence[Cut], limits: Limits) -> Plan:
    """The memory map of a model whose layers are cut up over `places` as `cuts` say."""
    context = limits.context(facts)
    stages = [_Stage(facts, limits, places[index], first, last, len(cuts)) for index, first, last in cuts]
    memories = [[s for s in stages if s.place.memory == name] for name in _names(stages)]
    tokens, reasons = _choose_tokens(facts, limits, context, memories, places)
    notes = []
    if limits.ctx > facts.n_ctx_train:
        notes.append(f"--ctx {limits.ctx} is more than the model was trained for: {facts.n_ctx_train:,}")
    if tokens < context:
        notes.append(
            f"requests are limited to the {tokens:,} tokens of the KV cache; the model could take {context:,}"
        )
    plain = dict.fromkeys(s.place.device for s in stages if s.place.gathers)
    if plain and facts.plain_kv_types != facts.kv_types:
        notes.append(
            f"{', '.join(plain)}: no kernels for an fp8 KV cache there, so --kv-type {facts.kv_types} is "
            f"{facts.plain_kv_types}"
        )
    planned = tuple(s.plan(cut[0], tokens) for s, cut in zip(stages, cuts, strict=True))
    return Plan(
        stages=planned,
        groups=_groups(facts, limits, tokens),
        kv_tokens=tokens,
        max_model_len=min(context, tokens),
        free_bytes=sum(max(s.place.free_bytes for s in members) for members in memories),
        reasons=tuple(reasons),
        notes=tuple(notes),
        shortages=tuple(_shortages(memories, tokens)),
        fitting_tokens=_most_tokens(tokens, lambda n: not _shortages(memories, n)),
    )


def explain_shortage(plan: Plan) -> str:
    """One line for the user: how much is missing where, and what to change."""
    parts = []
    for shortage in plan.shortages:
        stages = [s for s in plan.stages if s.device in shortage.devices]
        needed, free = sum(s.total_bytes for s in stages), max(s.free_bytes for s in stages)
        parts.append(
            f"not enough memory on {' and '.join(shortage.devices)}: the plan needs {needed} bytes "
            f"({format_size(needed)}), {shortage.nbytes} bytes more than can be used of the "
            f"{format_size(free)} that are free"
        )
    change = "free some memory, take a smaller quantization of the model, or add another --device"
    if plan.fitting_tokens:
        change = (
            f"lower --kv-tokens, --kv-memory or --ctx ({plan.fitting_tokens} tokens of KV cache have room), "
            "or free some memory"
        )
    return f"{'; '.join(parts)}; {change}"


def gathered_bytes(facts: ModelFacts, limits: Limits, place: Place, tokens: int) -> int:
    """What a stage there needs for gathered KV, its masks and states, with a KV cache of `tokens` tokens."""
    if not place.gathers:
        return 0
    states = GATHERED_STATES * limits.max_num_seqs * facts.state_bytes
    return states + facts.gather_bytes_per_token * min(tokens, max(limits.context(facts), GATHERED))


class _Stage:
    """Sizes of one stage; only those of the KV cache depend on the number of tokens."""

    def __init__(
        self, facts: ModelFacts, limits: Limits, place: Place, first: int, last: int, num_stages: int
    ):
        self.place, self._facts, self._limits = place, facts, limits
        assert facts.last_cut is None or first <= facts.last_cut, "layers apart from their keys and values"
        self._first, self._last = first, last
        ends = (first == 0, last == facts.n_layer)
        self.weights = sum(facts.layer_bytes[first:last]) + sum(
            size for size, there in zip((facts.embed_bytes, facts.head_bytes), ends, strict=True) if there
        )
        self.weights += facts.common_bytes - (facts.shared_bytes if all(ends) else 0)
        self._compute = stage_compute_bytes(facts, limits, place, ends[1], num_stages)

    def kv(self, tokens: int) -> int:
        layers = layer_kv_bytes(self._facts, self._limits, tokens, [self.place])
        return sum(layers[self._first : self._last])

    def compute(self, tokens: int) -> int:
        return self._compute + gathered_bytes(self._facts, self._limits, self.place, tokens)

    def total(self, tokens: int) -> int:
        return self.weights + self.kv(tokens) + self.compute(tokens)

    def plan(self, index: int, tokens: int) -> StagePlan:
        return StagePlan(
            self.place.device,
            (self._first, self._last),
            self.weights,
            self.kv(tokens),
            self.compute(tokens),
            self.place.free_bytes,
            index,
            kv_types=self._facts.plain_kv_types if self.place.gathers else self._facts.kv_types,
        )


def _names(stages: Sequence[_Stage]) -> list[str]:
    return list(dict.fromkeys(s.place.memory for s in stages))


def _usable(members: Sequence[_Stage]) -> int:
    """Bytes of a memory: what the one of its devices says that can use most of it."""
    return max(s.place.usable_bytes for s in members)


def _shortages(memories: Sequence[Sequence[_Stage]], tokens: int) -> list[Shortage]:
    found = []
    for members in memories:
        together = sum(s.total(tokens) for s in members) - _usable(members)
        alone = max(s.total(tokens) - s.place.usable_bytes for s in members)
        if max(together, alone) > 0:
            found.append(Shortage(tuple(s.place.device for s in members), max(together, alone)))
    return found


def _choose_tokens(
    facts: ModelFacts,
    limits: Limits,
    context: int,
    memories: Sequence[Sequence[_Stage]],
    places: Sequence[Place],
) -> tuple[int, list[str]]:
    """Tokens in the cache, a multiple of the block size, and why."""
    least, most = limits.least_tokens(facts), limits.most_tokens(facts)
    if limits.kv_tokens:
        return least, ["KV cache: as many tokens as --kv-tokens says"]
    if limits.kv_memory:
        tokens = tokens_of_memory(facts, limits, places)
        if tokens >= most:
            held = f"{limits.max_num_seqs} requests of {context:,} tokens"
            return most, [f"KV cache: {held}; more is never used"]
        return tokens, [f"KV cache: what fits in --kv-memory ({format_size(limits.kv_memory)})"]
    tightest = ""

    def fits(tokens: int) -> bool:
        nonlocal tightest
        for members in memories:
            free = max(s.place.free_bytes for s in members)
            quarter = members[0].place.shared and not limits.all_memory
            share = int(free * SHARE) if quarter else free
            if sum(s.kv(tokens) for s in members) > share or _shortages([members], tokens):
                tightest = f"a quarter of the free memory ({format_size(share)})"
                if not quarter:
                    tightest = "what the weights leave"
                if len(memories) > 1:
                    tightest += f" on {members[0].place.device}"
                return False
        return True

    tokens = _most_tokens(most, fits)
    if tokens >= most:
        return most, [f"KV cache: {limits.max_num_seqs} requests of {context:,} tokens"]
    if tokens >= least:
        return tokens, [f"KV cache: {tightest}"]
    return least, [f"KV cache: the least that is useful, {least:,} tokens"]


def _most_tokens(most: int, fits: Callable[[int], bool]) -> int:
    """The largest multiple of the block size, up to `most`, that fits."""
    low, high = 0, most // BLOCK_SIZE
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle * BLOCK_SIZE):
            low = middle
        else:
            high = middle - 1
    return low * BLOCK_SIZE


def _groups(facts: ModelFacts, limits: Limits, tokens: int) -> tuple[KVGroup, ...]:
    return kv_groups(facts.layer_windows, tokens, limits.max_num_seqs, limits.max_num_batched_tokens)
