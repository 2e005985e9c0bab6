"""The numbers of a model, read from GGUF metadata and checked against its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.ggml.models.families import FAMILIES, Family
from quant.gguf import GGUFFile

LINEAR_SCALINGS = ("none", "linear")
MAX_EXPERTS = 1024  # as upstream
VOCABULARY_KEY = "hetero.vocab_size"  # in a file without an embedding, which would say it


class ModelError(ValueError):
    """A model that cannot be run: unknown family or inconsistent metadata. One line for the user."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of one kind of layer: angle of pair i = position * scale * base^(-2i / n_rot).

    `factors` (a tensor of n_rot / 2 values, or None) divides each pair's frequency, as Llama 3's
    `rope_freqs.weight` does. Source: RoFormer (arXiv 2104.09864); ggml_rope_ext.
    """

    n_rot: int
    base: float
    scale: float
    neox: bool
    factors: str | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a model. `layer_windows[i]` is the attention window of layer i, None for all tokens.

    `n_expert` is 0 where the feed-forward is a single one; else `n_ff` is the width of each expert.
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
    n_ff: int
    n_vocab: int
    n_expert: int
    n_expert_used: int
    norm_eps: float
    attention_scale: float
    embedding_scale: float
    layer_windows: tuple[int | None, ...]
    rope_full: Rope
    rope_window: Rope

    def rope_of(self, layer: int) -> Rope:
        return self.rope_full if self.layer_windows[layer] is None else self.rope_window


def read_config(gguf: GGUFFile, layers: tuple[int, int] | None = None) -> ModelConfig:
    """Read the configuration of a model. Raises ModelError naming the key or tensor at fault.

    With `layers` (first, last) the file holds what a stage of layers [first, last) needs, and no more.
    """
    family = FAMILIES.get(gguf.architecture)
    if family is None:
        known = ", ".join(FAMILIES)
        raise ModelError(
            f"{gguf.path.name}: model family {gguf.architecture!r} is not supported (known: {known})"
        )
    meta = _Metadata(gguf.path.name, family.architecture, gguf.metadata)
    n_layer = meta.size("block_count", 1, 4096)
    n_embd, n_head = meta.size("embedding_length", 1, 1 << 20), meta.size("attention.head_count", 1, 4096)
    n_head_kv = meta.size("attention.head_count_kv", 1, 4096, n_head)
    head_dim = n_embd // n_head
    head_dim_k = meta.size("attention.key_length", 1, 4096, head_dim)
    head_dim_v = meta.size("attention.value_length", 1, 4096, head_dim)
    n_rot = meta.size("rope.dimension_count", 2, head_dim_k, head_dim_k)
    if n_head % n_head_kv or n_rot % 2:
        raise ModelError(
            f"{gguf.path.name}: {n_head} heads over {n_head_kv} KV heads, {n_rot} rotated dimensions"
        )
    n_expert, n_expert_used = _experts(meta, family)
    windows = _windows(meta, family, n_layer)
    config = ModelConfig(
        family=family,
        name=str(gguf.metadata.get("general.name", gguf.path.stem)),
        n_layer=n_layer,
        n_ctx_train=meta.size("context_length", 1, 1 << 30),
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        n_ff=_feed_forward(meta, n_expert),
        n_vocab=_vocabulary(gguf, n_embd, layers),
        n_expert=n_expert,
        n_expert_used=n_expert_used,
        norm_eps=meta.number("attention.layer_norm_rms_epsilon"),
        attention_scale=_attention_scale(meta, family, n_layer, n_embd, n_head, head_dim_k),
        embedding_scale=math.sqrt(n_embd) if family.scale_embeddings else 1.0,
        layer_windows=windows,
        rope_full=_rope(meta, gguf, family, n_rot, windowed=False),
        rope_window=_rope(meta, gguf, family, n_rot, windowed=True),
    )
    if layers is not None and not 0 <= layers[0] < layers[1] <= n_layer:
        raise ModelError(f"{gguf.path.name}: layers {layers[0]} to {layers[1]} of {n_layer}")
    _check_tensors(gguf, config, layers or (0, n_layer))
    return config


class _Metadata:
    """Typed access to `<architecture>.<key>`, with errors that name the key."""

    def __init__(self, file: str, architecture: str, metadata: Mapping[str, Any]):
        self.file, self.prefix, self.values = file, architecture, metadata

    def get(self, key: str) -> Any:
        return self.values.get(f"{self.prefix}.{key}")

    def size(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # per-layer arrays of one and the same number
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, value, f"an integer between {low} and {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, value, "a finite number")
        return float(value)

    def error(self, key: str, value: Any, want: str) -> ModelError:
        found = "missing" if value is None else f"{str(value)[:40]!r}"
        return ModelError(f"{self.file}: {self.prefix}.{key} must be {want}, it is {found}")


def _windows(meta: _Metadata, family: Family, n_layer: int) -> tuple[int | None, ...]:
    window = meta.size("attention.sliding_window", 0, 1 << 30, 0)
    if not window or not family.window_pattern:
        return (None,) * n_layer
    pattern = meta.get("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) == n_layer:
        return tuple(window if flag else None for flag in pattern)
    period = meta.size("attention.sliding_window_pattern", 1, 4096, family.window_pattern)
    return tuple(None if layer % period == period - 1 else window for layer in range(n_layer))


def _experts(meta: _Metadata, family: Family) -> tuple[int, int]:
    """(experts, how many of them a token uses), zeros for none; like upstream, a single one is none."""
    required = family.experts == "required"
    count = meta.size("expert_count", 2 if required else 0, MAX_EXPERTS, None if required else 0)
    if count <= 1:
        return 0, 0
    if family.experts == "none":
        raise meta.error("expert_count", count, "0 in this family")
    meta.size("expert_group_count", 0, 1, 0)  # more would limit which experts go together
    return count, meta.size("expert_used_count", 1, count)


def _feed_forward(meta: _Metadata, n_expert: int) -> int:
    """Width of the feed-forward, or of each expert's."""
    if n_expert and meta.get("expert_feed_forward_length") is not None:
        return meta.size("expert_feed_forward_length", 1, 1 << 24)
    return meta.size("feed_forward_length", 1, 1 << 24)


def _rope(meta: _Metadata, gguf: GGUFFile, family: Family, n_rot: int, *, windowed: bool) -> Rope:
    base = meta.number("rope.freq_base", 10000.0)
    scaling = meta.get("rope.scaling.type") or "none"
    if scaling not in LINEAR_SCALINGS:
        raise ModelError(f"{meta.file}: {meta.prefix}.rope.scaling.type {scaling!r} is not supported yet")
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 0.0))
    scale = 1.0 if factor == 0.0 else 1.0 / factor
    if windowed and family.window_rope_base is not None:
        # local layers keep the short-context base and are never stretched
        base, scale = meta.number("rope.freq_base_swa", family.window_rope_base), 1.0
    factors = "rope_freqs.weight" if "rope_freqs.weight" in gguf.tensors else None
    return Rope(n_rot, base, scale, family.rope_neox, factors)


def _attention_scale(
    meta: _Metadata, family: Family, n_layer: int, n_embd: int, n_head: int, head_dim: int
) -> float:
    if family.architecture == "gemma3" and n_layer == 62:  # 27B: query_pre_attn_scalar = n_embd / n_head
        return 1.0 / math.sqrt(n_embd / n_head)
    return meta.number("attention.scale", 0.0) or 1.0 / math.sqrt(head_dim)


def _vocabulary(gguf: GGUFFile, n_embd: int, layers: tuple[int, int] | None) -> int:
    info = gguf.tensors.get("token_embd.weight")
    if info is None and layers is not None:
        return _Metadata(gguf.path.name, "hetero", gguf.metadata).size("vocab_size", 1, 1 << 24)
    if info is None or len(info.shape) != 2 or info.shape[0] != n_embd:
        raise ModelError(f"{gguf.path.name}: tensor token_embd.weight is missing or not {n_embd} wide")
    return info.shape[1]


def layer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names (within `blk.N.`, without `.weight`) and shapes of a block's tensors, row length first."""
    c = config
    q, k, v = c.n_head * c.head_dim_k, c.n_head_kv * c.head_dim_k, c.n_head_kv * c.head_dim_v
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (c.n_embd,),
        "attn_q": (c.n_embd, q),
        "attn_k": (c.n_embd, k),
        "attn_v": (c.n_embd, v),
        "attn_output": (c.n_head * c.head_dim_v, c.n_embd),
        "ffn_norm": (c.n_embd,),
    }
    if c.n_expert:
        shapes |= {
            "ffn_gate_inp": (c.n_embd, c.n_expert),
            "ffn_gate_exps": (c.n_embd, c.n_ff, c.n_expert),
            "ffn_up_exps": (c.n_embd, c.n_ff, c.n_expert),
            "ffn_down_exps": (c.n_ff, c.n_embd, c.n_expert),
        }
    else:
        shapes |= {
            "ffn_gate": (c.n_embd, c.n_ff),
            "ffn_up": (c.n_embd, c.n_ff),
            "ffn_down": (c.n_ff, c.n_embd),
        }
    if c.family.qk_norm:
        shapes |= {"attn_q_norm": (c.head_dim_k,), "attn_k_norm": (c.head_dim_k,)}
    if c.family.post_norms:
        shapes |= {"post_attention_norm": (c.n_embd,), "post_ffw_norm": (c.n_embd,)}
    return shapes


def _check_tensors(gguf: GGUFFile, config: ModelConfig, layers: tuple[int, int]) -> None:
    """Every weight of these layers present with its shape, and none that would be silently left out."""
    first, last = layers
    wanted: dict[str, tuple[int, ...]] = {
        f"blk.{i}.{n}.weight": s for i in range(first, last) for n, s in layer_tensors(config).items()
    }
    optional: dict[str, tuple[int, ...]] = {"rope_freqs.weight": (config.rope_full.n_rot // 2,)}
    if last == config.n_layer:
        wanted["output_norm.weight"] = (config.n_embd,)
        optional["output.weight"] = (config.n_embd, config.n_vocab)
    if first == 0 or (last == config.n_layer and "output.weight" not in gguf.tensors):
        wanted["token_embd.weight"] = (config.n_embd, config.n_vocab)
    for name, shape in wanted.items():
        info = gguf.tensors.get(name)
        if info is None:
            raise ModelError(f"{gguf.path.name}: tensor {name} is missing")
        if info.shape != shape:
            raise ModelError(f"{gguf.path.name}: tensor {name} has shape {info.shape}, expected {shape}")
    for name, info in gguf.tensors.items():
        if name in wanted:
            continue
        if name not in optional:
            raise ModelError(
                f"{gguf.path.name}: tensor {name} is not part of family {config.family.architecture}"
            )
        if info.shape != optional[name]:
            raise ModelError(
                f"{gguf.path.name}: tensor {name} has shape {info.shape}, expected {optional[name]}"
            )
