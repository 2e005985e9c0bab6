"""What a plan starts from: a model's sizes, what the user asked for, and the devices' memories."""

from __future__ import annotations

from dataclasses import dataclass

from backends.base import BLOCK_SIZE, RECURRENT
from hetero.kv_types import F16, KVTypes

SPARE = 0.9  # of the free memory, the most that a plan may use
MIN_CONTEXT = 2048  # tokens; a smaller cache than this is refused rather than chosen


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the plan needs to know of a model. Bytes, bounded from above where they vary.

    `layer_windows[i]`, `kv_bytes_per_token[i]` (K and V of one token) and `layer_bytes[i]` (weights)
    are of layer i. `embed_bytes` are the weights that the first stage has on top, `head_bytes` those of
    the last; of these, a stage that is both holds `shared_bytes` once only (a matrix that is both).
    Every stage has `common_bytes` of weights; none can begin behind layer `last_cut` (None: anywhere).
    `compute_bytes` is what a step's graph needs, `logits_bytes` what the last stage's needs on top;
    `rows_bytes` is what a stage hands on in a step. A device without kernels of ours gathers a sequence's
    KV first: `gather_bytes_per_token` for each of its tokens. It keeps `plain_kv_types`, which may take
    `plain_kv_bytes_per_token`; (): what `kv_types` take everywhere else. The experts of `host_experts`
    layers are in main memory whichever device has the layer: `moved_bytes[i]` (none: ()) of layer i, which
    are not among its `layer_bytes`.
    A recurrent layer (window RECURRENT) has no keys and values; each of its states takes `state_bytes`.
    """

    n_ctx_train: int
    layer_windows: tuple[int | None, ...]
    kv_bytes_per_token: tuple[int, ...]
    layer_bytes: tuple[int, ...]
    embed_bytes: int
    head_bytes: int
    compute_bytes: int
    logits_bytes: int = 0
    rows_bytes: int = 0
    common_bytes: int = 0
    last_cut: int | None = None
    gather_bytes_per_token: int = 0
    shared_bytes: int = 0
    plain_kv_bytes_per_token: tuple[int, ...] = ()
    kv_types: KVTypes = F16
    plain_kv_types: KVTypes = F16
    host_experts: int = 0
    moved_bytes: tuple[int, ...] = ()
    state_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        """Of experts, in main memory."""
        return sum(self.moved_bytes)

    def token_bytes(self, plain: bool) -> tuple[int, ...]:
        """K and V of a token in each layer; `plain`: on a device without kernels of ours."""
        return (plain and self.plain_kv_bytes_per_token) or self.kv_bytes_per_token

    @property
    def recurrent(self) -> bool:
        return RECURRENT in self.layer_windows

    @property
    def n_layer(self) -> int:
        return len(self.layer_windows)

    @property
    def weight_bytes(self) -> int:
        """With one stage."""
        return (
            sum(self.layer_bytes) + self.embed_bytes + self.head_bytes + self.common_bytes + self.host_bytes
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user asked for; 0 means "decide for me"."""

    ctx: int = 0
    kv_memory: int = 0
    kv_tokens: int = 0
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    pipeline_depth: int = 0
    all_memory: bool = False  # for the KV cache that nobody sized, also where other programs live
    draft_rows: int = 0  # of logits in a step, beside one for each request

    def context(self, facts: ModelFacts) -> int:
        """The longest context of one request that is asked for, in tokens."""
        return min(self.ctx or facts.n_ctx_train, facts.n_ctx_train)

    def most_tokens(self, facts: ModelFacts) -> int:
        """More than these tokens of KV cache are never used."""
        return round_up(self.max_num_seqs * self.context(facts))

    def least_tokens(self, facts: ModelFacts) -> int:
        """The KV cache below which a plan does not fit."""
        if self.kv_tokens:
            return round_up(self.kv_tokens)
        context = self.context(facts)
        return round_up(context if self.ctx else min(context, MIN_CONTEXT))


@dataclass(frozen=True, slots=True)
class Place:
    """A device that can hold a stage, with the memory it has to give.

    `memory` names that memory: CPU devices of one machine share theirs. `shared`: other programs live
    there too. `gathers`: it has no kernels of ours, so that attention needs the gathered KV of a sequence.
    """

    device: str
    free_bytes: int
    memory: str
    shared: bool = True
    gathers: bool = False

    @property
    def usable_bytes(self) -> int:
        return int(self.free_bytes * SPARE)


def round_up(tokens: int) -> int:
    """Whole blocks."""
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE
