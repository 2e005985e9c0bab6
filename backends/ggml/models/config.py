"""The numbers of a model, read from GGUF metadata and checked against its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from backends.base import RECURRENT, KVHeads
from backends.ggml.models.delta_net import DeltaNet, read_delta_net, recurrent_layers
from backends.ggml.models.families import FAMILIES, Family
from backends.ggml.models.heads import Heads, read_heads
from backends.ggml.models.metadata import Metadata, ModelError, NotNative
from backends.ggml.models.mixture import Mixture, read_mixture
from backends.ggml.models.rope import Rope, read_rope
from backends.ggml.models.tensors import FUSED_QKV, check_tensors, layer_tensors, optional_tensors
from quant.gguf import GGUFFile

LAYER_INPUT = "embedding_length_per_layer_input"
VOCABULARY_KEY = "hetero.vocab_size"  # in a file without an embedding, which would say it


class Growth(NamedTuple):
    """Queries at position p are multiplied by 1 + scale * ln(1 + p // every), against fading attention.

    Source: "Llama 4" and Ministral 3; llm_graph_input_attn_temp of llama.cpp.
    """

    scale: float
    every: int

    def factors(self, positions: np.ndarray) -> np.ndarray:
        """float32 [T]."""
        return (1.0 + self.scale * np.log1p(positions // self.every)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a model. `layer_windows[i]` is the attention window of layer i, None for all tokens,
    RECURRENT for none at all, and `layer_ropes[i]` its RoPE, None for none. `delta_net`: of recurrent layers.

    `ff_widths[i]` is that of layer i's feed-forward without experts, 0 where it has only the `mixture`.
    Scores s of attention become c tanh(s / c) with c = `attention_softcap`, 0 for none; so do logits, after
    they were multiplied by `logit_scale`. A sublayer's output is multiplied by `residual_scale` before it
    is added. `present` names what the file has of tensors that others of the family may lack. Layers with a
    window have `window_heads` where these differ from `n_head_kv`, `head_dim_k` and `head_dim_v`. The last
    `shared_kv` layers attend keys and values of earlier ones. `layer_input` is the width of what each layer
    takes in beside its hidden rows (layer_inputs.py), 0 for none.
    """

    family: Family
    name: str
    n_layer: int
    n_ctx_train: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    ff_widths: tuple[int, ...]
    n_vocab: int
    mixture: Mixture | None
    norm_eps: float
    attention_scale: float
    attention_softcap: float
    query_growth: Growth | None
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    logit_softcap: float
    layer_windows: tuple[int | None, ...]
    layer_ropes: tuple[Rope | None, ...]
    present: frozenset[str]
    window_heads: KVHeads | None = None
    delta_net: DeltaNet | None = None
    shared_kv: int = 0
    layer_input: int = 0

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer has a state in place of keys and values."""
        return self.layer_windows[layer] == RECURRENT

    def has_experts(self, layer: int) -> bool:
        return self.mixture is not None and layer >= self.mixture.first_layer

    def has_experts_beside(self, layer: int) -> bool:
        """Whether a layer has experts and a feed-forward without such."""
        return self.mixture is not None and self.mixture.options.beside and self.has_experts(layer)

    def shares_kv(self, layer: int) -> bool:
        return layer >= self.n_layer - self.shared_kv

    def kv_layer(self, layer: int) -> int:
        """The layer whose keys and values a layer attends: its own, or the last with such of its kind.

        Source: llama_model::create_memory of llama.cpp, for gemma4.
        """
        if not self.shares_kv(layer):
            return layer
        return self.n_layer - self.shared_kv - (1 if self.layer_windows[layer] is None else 2)

    @property
    def last_cut(self) -> int:
        """A stage can begin at this layer or before: those from there on attend the same keys and values."""
        shared = range(self.n_layer - self.shared_kv, self.n_layer)
        return min((self.kv_layer(layer) for layer in shared), default=self.n_layer - 1)

    def heads_of(self, layer: int) -> KVHeads:
        if self.window_heads is not None and self.layer_windows[layer] is not None:
            return self.window_heads
        return KVHeads(self.n_head_kv, self.head_dim_k, self.head_dim_v)

    def rope_of(self, layer: int) -> Rope | None:
        return self.layer_ropes[layer]

    def for_context(self, context: int) -> ModelConfig:
        """The model for contexts of up to so many tokens; 0: as long as it was trained for."""
        ropes = {r: r and r.for_context(context or self.n_ctx_train) for r in set(self.layer_ropes)}
        return replace(self, layer_ropes=tuple(ropes[r] for r in self.layer_ropes))


def read_config(gguf: GGUFFile, layers: tuple[int, int] | None = None) -> ModelConfig:
    """Read the configuration of a model. Raises ModelError naming the key or tensor at fault.

    With `layers` (first, last) the file holds what a stage of layers [first, last) needs, and no more.
    NotNative: nothing may be wrong with the file, but there is no builder for it here.
    """
    family = FAMILIES.get(gguf.architecture)
    if family is None:
        known = ", ".join(FAMILIES)
        raise NotNative(
            f"{gguf.path.name}: model family {gguf.architecture!r} is not supported (known: {known})"
        )
    meta = Metadata(gguf.path.name, family.architecture, gguf.metadata)
    _refuse_unbuilt(meta, family)
    count = meta.size("block_count", 1, 4096)
    spare = meta.size("nextn_predict_layers", 0, count - 1, 0)  # guess the next tokens; left out
    n_layer = count - spare
    n_ctx_train = meta.size("context_length", 1, 1 << 30)
    mixture = read_mixture(meta, family.mixture, n_layer)
    windows = _windows(meta, family, n_layer)
    heads = read_heads(meta, family, windows)
    rope = read_rope(meta, gguf.tensors, heads.n_rot, family.rope_neox, n_ctx_train)
    norm = "attention.layer_norm_rms_epsilon" if family.norm == "rms" else "attention.layer_norm_epsilon"
    config = ModelConfig(
        family=family,
        name=str(gguf.metadata.get("general.name", gguf.path.stem)),
        n_layer=n_layer,
        n_ctx_train=n_ctx_train,
        n_embd=heads.n_embd,
        n_head=heads.n_head,
        n_head_kv=heads.kv.n,
        head_dim_k=heads.kv.dim_k,
        head_dim_v=heads.kv.dim_v,
        window_heads=heads.windowed,
        ff_widths=_ff_widths(meta, mixture, n_layer),
        n_vocab=_vocabulary(gguf, heads.n_embd, layers),
        mixture=mixture,
        norm_eps=meta.number(norm),
        attention_scale=_attention_scale(meta, family, n_layer, heads),
        attention_softcap=_softcap(meta, "attn_logit_softcapping", family.attention_softcap),
        query_growth=_query_growth(meta, n_ctx_train),
        embedding_scale=_embedding_scale(meta, family, heads.n_embd),
        residual_scale=meta.number("residual_scale", 0.0) or 1.0,
        logit_scale=_logit_scale(meta, family),
        logit_softcap=_softcap(meta, "final_logit_softcapping", family.logit_softcap),
        layer_windows=windows,
        layer_ropes=_ropes(meta, family, rope, heads.window_rot, windows),
        present=optional_tensors(gguf.tensors),
        delta_net=read_delta_net(meta) if family.recurrent else None,
        shared_kv=_shared_kv(meta, family, windows),
        layer_input=meta.size(LAYER_INPUT, 0, 1 << 16, 0) if family.layer_inputs else 0,
    )
    if any(f"blk.{i}.{FUSED_QKV}.weight" in config.present for i in range(n_layer) if config.shares_kv(i)):
        raise NotNative(f"{gguf.path.name}: keys in one matrix with queries, of layers that share others")
    if layers is not None and not 0 <= layers[0] < layers[1] <= n_layer:
        raise ModelError(f"{gguf.path.name}: layers {layers[0]} to {layers[1]} of {n_layer}")
    check_tensors(gguf, config, layers or (0, n_layer), spare)
    return config


def _refuse_unbuilt(meta: Metadata, family: Family) -> None:
    """What files for pictures have, or others of the family, and those that are built do not.

    Text has the same position in all sections but the last.
    """
    sections = meta.get("rope.dimension_sections")
    if isinstance(sections, list) and any(sections[3:] if family.recurrent else sections[:2]):
        raise NotNative(f"{meta.file}: {meta.prefix}.rope.dimension_sections: RoPE in sections is not built")
    if meta.get("deepstack_mapping") is not None:
        raise NotNative(f"{meta.file}: {meta.prefix}.deepstack_mapping: a vision model is not built")


def _windows(meta: Metadata, family: Family, n_layer: int) -> tuple[int | None, ...]:
    if family.recurrent:
        return tuple(RECURRENT if flag else None for flag in recurrent_layers(meta, n_layer))
    window = meta.size("attention.sliding_window", 0, 1 << 30, family.window)
    if not window or not family.window_pattern:
        return (None,) * n_layer
    pattern = meta.get("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) >= n_layer:
        return tuple(window if flag else None for flag in pattern[:n_layer])
    period = meta.size("attention.sliding_window_pattern", 1, 4096, family.window_pattern)
    return tuple(None if layer % period == period - 1 else window for layer in range(n_layer))


def _ff_widths(meta: Metadata, mixture: Mixture | None, n_layer: int) -> tuple[int, ...]:
    dense = n_layer if mixture is None or mixture.options.beside else mixture.first_layer
    widths = meta.sizes("feed_forward_length", 1, 1 << 24, n_layer) if dense else ()
    return (*widths[:dense], *(0 for _ in range(n_layer - dense)))


def _shared_kv(meta: Metadata, family: Family, windows: Sequence[int | None]) -> int:
    """The last layers that share keys and values; two before them, one with a window and one without, have
    those."""
    key = "attention.shared_kv_layers"
    count = meta.size(key, 0, max(0, len(windows) - 2), 0) if family.shared_kv else 0
    own, shared = windows[: len(windows) - count], windows[len(windows) - count :]
    if count and (any(own[-1 if w is None else -2] != w for w in shared)):
        raise meta.error(key, count, "so that layers with a window and without one precede those that share")
    return count


def _ropes(
    meta: Metadata, family: Family, rope: Rope, window_rot: int, windows: tuple[int | None, ...]
) -> tuple[Rope | None, ...]:
    default = rope.base if family.window_rope_base is None else family.window_rope_base
    base = meta.number("rope.freq_base_swa", default)
    if base <= 1.0:
        raise meta.error("rope.freq_base_swa", base, "greater than 1")
    windowed = replace(rope, base=base) if family.window_rope_scaled else rope.unscaled(base)
    windowed = replace(windowed, n_rot=window_rot)
    turned = meta.flag("rope.scaling.finetuned", True) if family.no_rope == "switch" else True
    ropes: list[Rope | None] = []
    for layer, window in enumerate(windows):
        left_out = (
            window == RECURRENT
            or (family.no_rope == "fourth" and layer % 4 == 3)
            or (family.no_rope == "unwindowed" and window is None)
        )
        ropes.append(None if left_out or not turned else rope if window is None else windowed)
    return tuple(ropes)


def _attention_scale(meta: Metadata, family: Family, n_layer: int, heads: Heads) -> float:
    if family.unscaled_scores:
        return 1.0
    if n_layer == family.wide_layers:
        return 1.0 / math.sqrt(heads.n_embd // heads.n_head)
    return meta.number("attention.scale", 0.0) or 1.0 / math.sqrt(heads.kv.dim_k)


def _embedding_scale(meta: Metadata, family: Family, n_embd: int) -> float:
    return math.sqrt(n_embd) if family.scale_embeddings else meta.number("embedding_scale", 0.0) or 1.0


def _query_growth(meta: Metadata, n_ctx_train: int) -> Growth | None:
    scale = meta.number("attention.temperature_scale", 0.0)
    every = meta.size("rope.scaling.original_context_length", 1, 1 << 30, n_ctx_train)
    return Growth(scale, every) if scale else None


def _softcap(meta: Metadata, key: str, default: float) -> float:
    cap = meta.number(key, default)
    if cap < 0.0:
        raise meta.error(key, cap, "at least 0")
    return cap


def _logit_scale(meta: Metadata, family: Family) -> float:
    scale = meta.number("logit_scale", 0.0) or 1.0
    return 1.0 / scale if family.divide_logits else scale


def _vocabulary(gguf: GGUFFile, n_embd: int, layers: tuple[int, int] | None) -> int:
    info = gguf.tensors.get("token_embd.weight")
    if info is None and layers is not None:
        return Metadata(gguf.path.name, "hetero", gguf.metadata).size("vocab_size", 1, 1 << 24)
    if info is None or len(info.shape) != 2 or info.shape[0] != n_embd:
        raise ModelError(f"{gguf.path.name}: tensor token_embd.weight is missing or not {n_embd} wide")
    return info.shape[1]


__all__ = [
    "VOCABULARY_KEY",
    "Growth",
    "ModelConfig",
    "ModelError",
    "NotNative",
    "Rope",
    "layer_tensors",
    "read_config",
]
