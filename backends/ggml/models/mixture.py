"""The numbers of a mixture of experts, and the tensors that belong to one.

Which experts a token goes to, and with which shares (build_moe_ffn of llama.cpp):

    logits  l = router norm(x), plus the router's bias
    scores  s = softmax(l) or sigmoid(l), or l itself; plus the bias of selection where there is one
    groups    only experts of the groups are left whose two best scores have the highest sums
    chosen    the experts with the highest scores
    shares    what l became without the bias of selection; or the softmax of the chosen ones' l alone;
              perhaps divided by their sum; times `scale`

Sources: Mixtral (arXiv 2401.04088), Qwen3 (2505.09388), DeepSeek-V3 (2412.19437) for sigmoids, groups and
the bias of selection, gpt-oss (2508.10925) for the softmax of the chosen ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from backends.ggml.models.metadata import Metadata

Gating = Literal["softmax", "sigmoid", "chosen"]  # of all logits, of each, softmax of the chosen ones' alone

MAX_EXPERTS = 1024  # as upstream
SMALLEST_SUM = 2.0**-14  # of the chosen experts' shares, so that nothing is divided by zero
OAI_ALPHA, OAI_LIMIT = 1.702, 7.0  # of gpt-oss' activation, as upstream
FUSED_EXPERTS = "ffn_gate_up_exps"
GATINGS: dict[int, Gating] = {1: "softmax", 2: "sigmoid", 3: "chosen"}  # of key expert_gating_func


@dataclass(frozen=True, slots=True)
class MixtureOptions:
    """What a family's mixtures of experts have.

    `required`: whether every model of the family has one. `divided`: without a width of their own, experts
    divide that of a dense feed-forward among those that a token uses. `normed`: shares are divided by their
    sum, None where the file says. `gating`: where the file does not say. `shared`: whether one more expert
    may serve all tokens; `shared_gate`: its output is weighed with the sigmoid of a product.
    `selection_bias`: a bias chooses experts but does not weigh them. `biases`: of the experts'
    matrices. `beside`: of a dense feed-forward, each with norms of its own; the router's is scaled by
    1 / sqrt(n_embd), and experts' outputs by a number each where the file has these.
    """

    required: bool = True
    divided: bool = False
    gating: Gating = "softmax"
    normed: bool | None = True
    shared: bool = False
    shared_gate: bool = False
    selection_bias: bool = False
    biases: bool = False
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Mixture:
    """The mixture of experts of one model, in its layers from `first_layer` on.

    `width` is of each expert's feed-forward, `shared_width` that of the one for all tokens (0: none). Of
    `groups` groups of experts a token uses `groups_used`; one group is none. `scale` is of the shares.
    """

    options: MixtureOptions
    count: int
    used: int
    width: int
    shared_width: int
    gating: Gating
    normed: bool
    scale: float
    groups: int
    groups_used: int
    first_layer: int

    @property
    def shared(self) -> bool:
        return self.shared_width > 0


class ExpertWeights(NamedTuple):
    """Tensor names of one layer; gate, up and down are [row length, rows, experts]. Where gate and up are in
    one tensor, one above the other, both name it."""

    norm: str
    router: str
    gate: str
    up: str
    down: str


def expert_weights(layer: int, norm: str = "ffn_norm", fused: bool = False) -> ExpertWeights:
    inputs = (FUSED_EXPERTS, FUSED_EXPERTS) if fused else ("ffn_gate_exps", "ffn_up_exps")
    names = (norm, "ffn_gate_inp", *inputs, "ffn_down_exps")
    return ExpertWeights(*(f"blk.{layer}.{name}.weight" for name in names))


def read_mixture(meta: Metadata, options: MixtureOptions | None, n_layer: int) -> Mixture | None:
    """The mixture that the metadata describe, None for none. Like upstream, a single expert is none."""
    required = options is not None and options.required
    count = meta.size("expert_count", 2 if required else 0, MAX_EXPERTS, None if required else 0)
    if count <= 1:
        return None
    if options is None:
        raise meta.error("expert_count", count, "0 in this family")
    used = meta.size("expert_used_count", 1, count)
    groups, groups_used = _groups(meta, count, used)
    width = _width(meta, options, used)
    return Mixture(
        options=options,
        count=count,
        used=used,
        width=width,
        shared_width=_shared_width(meta, options, width),
        gating=_gating(meta, options),
        normed=meta.flag("expert_weights_norm", False) if options.normed is None else options.normed,
        scale=meta.number("expert_weights_scale", 0.0) or 1.0,
        groups=groups,
        groups_used=groups_used,
        first_layer=meta.size("leading_dense_block_count", 0, n_layer, 0),
    )


def _groups(meta: Metadata, count: int, used: int) -> tuple[int, int]:
    """(groups of experts, those that a token uses); one group is none."""
    groups = max(1, meta.size("expert_group_count", 0, count - 1, 0))
    if groups == 1:
        return 1, 1
    if count % groups or count // groups < 2:
        raise meta.error("expert_group_count", groups, f"a number of groups of the same size, of {count}")
    groups_used = meta.size("expert_group_used_count", 1, groups - 1)
    if used > groups_used * (count // groups):
        raise meta.error("expert_used_count", used, f"at most what {groups_used} of {groups} groups have")
    return groups, groups_used


def _width(meta: Metadata, options: MixtureOptions, used: int) -> int:
    if meta.get("expert_feed_forward_length") is not None:
        return meta.size("expert_feed_forward_length", 1, 1 << 24)
    width = meta.size("feed_forward_length", 1, 1 << 24)
    return width // used if options.divided else width


def _shared_width(meta: Metadata, options: MixtureOptions, width: int) -> int:
    if not options.shared:
        return 0
    key = "expert_shared_feed_forward_length"
    if meta.get(key) is not None:
        return meta.size(key, 0, 1 << 24)
    if options.shared_gate:  # qwen2moe's is as wide as a dense feed-forward
        return meta.size("feed_forward_length", 1, 1 << 24)
    return width * meta.size("expert_shared_count", 0, 64, 0)


def _gating(meta: Metadata, options: MixtureOptions) -> Gating:
    number = meta.size("expert_gating_func", 0, max(GATINGS), 0)
    return GATINGS[number] if number else options.gating
