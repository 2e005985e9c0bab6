"""Tiny random models of the families with experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf_tools import Raw, write_gguf
from tiny_models import bpe_vocab, random_tensor

Tensor = Raw | np.ndarray


class Sizes(NamedTuple):
    layers: int = 3
    embd: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    width: int = 32  # of each expert
    dense: int = 96  # of layers without experts
    experts: int = 8
    used: int = 3


class Writer:
    """Random tensors of one model."""

    def __init__(self, sizes: Sizes, seed: int, weight_type: str, expert_type: str):
        self.sizes, self.rng = sizes, np.random.default_rng(seed)
        self._type, self._expert_type = weight_type, expert_type

    def weight(self, *shape: int) -> Tensor:
        return random_tensor(self.rng, shape, self._type, shape[-1] ** -0.5)

    def experts(self, *shape: int) -> Tensor:
        return random_tensor(self.rng, (self.sizes.experts, *shape), self._expert_type, shape[-1] ** -0.5)

    def norm(self, size: int) -> np.ndarray:
        return (1 + 0.2 * self.rng.standard_normal(size)).astype(np.float32)

    def vector(self, *shape: int, deviation: float = 0.3) -> np.ndarray:
        return (deviation * self.rng.standard_normal(shape)).astype(np.float32)

    def attention(self) -> dict[str, Tensor]:
        s = self.sizes
        q, k = s.heads * s.head_dim, s.kv_heads * s.head_dim
        return {
            "attn_norm.weight": self.norm(s.embd),
            "attn_q.weight": self.weight(q, s.embd),
            "attn_k.weight": self.weight(k, s.embd),
            "attn_v.weight": self.weight(k, s.embd),
            "attn_output.weight": self.weight(s.embd, q),
        }

    def qkv_biases(self) -> dict[str, Tensor]:
        s = self.sizes
        widths = {"q": s.heads * s.head_dim, "k": s.kv_heads * s.head_dim, "v": s.kv_heads * s.head_dim}
        return {f"attn_{name}.bias": self.vector(width) for name, width in widths.items()}

    def head_norms(self) -> dict[str, Tensor]:
        return {f"attn_{name}_norm.weight": self.norm(self.sizes.head_dim) for name in "qk"}

    def mixture(self) -> dict[str, Tensor]:
        """The router's logits have a deviation of 2, which makes clear choices."""
        s = self.sizes
        return {
            "ffn_gate_inp.weight": self.vector(s.experts, s.embd, deviation=2 * s.embd**-0.5),
            "ffn_gate_exps.weight": self.experts(s.width, s.embd),
            "ffn_up_exps.weight": self.experts(s.width, s.embd),
            "ffn_down_exps.weight": self.experts(s.embd, s.width),
        }

    def feed_forward(self, width: int, suffix: str = "") -> dict[str, Tensor]:
        return {
            f"ffn_gate{suffix}.weight": self.weight(width, self.sizes.embd),
            f"ffn_up{suffix}.weight": self.weight(width, self.sizes.embd),
            f"ffn_down{suffix}.weight": self.weight(self.sizes.embd, width),
        }


Layer = Callable[[Writer, int], dict[str, Tensor]]


def _plain(w: Writer, layer: int) -> dict[str, Tensor]:
    return w.attention() | {"ffn_norm.weight": w.norm(w.sizes.embd)} | w.mixture()


def _qwen2moe(w: Writer, layer: int) -> dict[str, Tensor]:
    gate = {"ffn_gate_inp_shexp.weight": w.vector(w.sizes.embd)}
    return _plain(w, layer) | w.qkv_biases() | gate | w.feed_forward(64, "_shexp")


def _qwen3moe(w: Writer, layer: int) -> dict[str, Tensor]:
    return _plain(w, layer) | w.head_norms()


def _granitemoe(w: Writer, layer: int) -> dict[str, Tensor]:
    return _plain(w, layer) | w.feed_forward(64, "_shexp")


def _glm4moe(w: Writer, layer: int) -> dict[str, Tensor]:
    s = w.sizes
    common = w.attention() | w.qkv_biases() | {"post_attention_norm.weight": w.norm(s.embd)}
    if layer == 0:
        return common | w.feed_forward(s.dense)
    bias = {"exp_probs_b.bias": w.vector(s.experts)}
    routed = common | w.mixture() | bias | w.feed_forward(2 * s.width, "_shexp")
    if layer < s.layers:
        return routed
    # what predicts a second token, which nobody asks for
    norms = {f"nextn.{name}.weight": w.norm(s.embd) for name in ("enorm", "hnorm", "shared_head_norm")}
    return routed | norms | {"nextn.eh_proj.weight": w.weight(s.embd, 2 * s.embd)}


def _gpt_oss(w: Writer, layer: int) -> dict[str, Tensor]:
    s = w.sizes
    return (
        w.attention()
        | w.qkv_biases()
        | w.mixture()
        | {
            "attn_output.bias": w.vector(s.embd),
            "attn_sinks.weight": w.vector(s.heads, deviation=2.0),
            "post_attention_norm.weight": w.norm(s.embd),
            "ffn_gate_inp.bias": w.vector(s.experts),
            "ffn_gate_exps.bias": w.vector(s.experts, s.width),
            "ffn_up_exps.bias": w.vector(s.experts, s.width),
            "ffn_down_exps.bias": w.vector(s.experts, s.embd),
        }
    )


def _gemma4(w: Writer, layer: int) -> dict[str, Tensor]:
    """Experts' gate and up in one matrix. What the router reads is divided by the root of its width."""
    s, mixture = w.sizes, w.mixture()
    gate, up = (mixture.pop(f"ffn_{name}_exps.weight") for name in ("gate", "up"))
    if isinstance(gate, Raw) or isinstance(up, Raw):
        both: Tensor = w.experts(2 * s.width, s.embd)
    else:
        both = np.concatenate([gate, up], axis=1)
    norms = ("ffn_norm", "post_attention_norm", "post_ffw_norm", "pre_ffw_norm_2")
    names = (*norms, "post_ffw_norm_1", "post_ffw_norm_2")
    return (
        w.attention()
        | {name: 0.4 * norm for name, norm in w.head_norms().items()}
        | {f"{name}.weight": w.norm(s.embd) for name in names}
        | w.feed_forward(s.dense)
        | mixture
        | {
            "ffn_gate_up_exps.weight": both,
            "ffn_gate_inp.scale": w.norm(s.embd) * np.float32(s.embd**0.5),
            "ffn_down_exps.scale": w.norm(s.experts),
        }
    )


LAYERS: dict[str, Layer] = {
    "llama": _plain,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "granitemoe": _granitemoe,
    "glm4moe": _glm4moe,
    "gpt-oss": _gpt_oss,
    "gemma4": _gemma4,
}


def _own_metadata(arch: str, s: Sizes) -> dict[str, Any]:
    """What the family's files say besides the sizes."""
    if arch == "qwen2moe":
        return {"expert_feed_forward_length": s.width, "expert_shared_feed_forward_length": 64}
    if arch == "qwen3moe":
        return {"expert_feed_forward_length": s.width}
    if arch == "granitemoe":
        scales = {"logit_scale": 3.0, "residual_scale": 0.6, "embedding_scale": 2.0, "attention.scale": 0.4}
        return scales | {"expert_shared_feed_forward_length": 64, "feed_forward_length": s.width}
    if arch == "glm4moe":
        return {
            "block_count": s.layers + 1,
            "nextn_predict_layers": 1,
            "rope.dimension_count": s.head_dim // 2,
            "expert_feed_forward_length": s.width,
            "expert_shared_count": 2,
            "leading_dense_block_count": 1,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        }
    if arch == "gemma4":
        return {
            "expert_feed_forward_length": s.width,
            "embedding_length_per_layer_input": 0,
            "attention.sliding_window": 16,
            "attention.sliding_window_pattern": [layer % 3 != 1 for layer in range(s.layers)],
            "attention.key_length_swa": s.head_dim,
            "attention.value_length_swa": s.head_dim,
            "rope.dimension_count_swa": s.head_dim,
            "final_logit_softcapping": 3.0,
        }
    if arch == "gpt-oss":
        return {
            "expert_feed_forward_length": s.width,
            "attention.sliding_window": 16,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 64,
        }
    return {"feed_forward_length": s.width}


def tiny_experts(
    path: Path,
    arch: str,
    seed: int = 0,
    *,
    sizes: Sizes | None = None,
    weight_type: str = "F32",
    expert_type: str = "",
    metadata: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    head_norms: bool = False,
    apart: bool = False,
) -> Path:
    """Write a random model of one of LAYERS' families and return `path`.

    `expert_type`: of the experts' matrices, where not `weight_type`. `metadata`: keys without the family's
    name, None for one that is left out. `without`: tensors of each layer that are left out, by the end of
    their names. `head_norms`: queries and keys have norms, which the family's others may lack. `apart`: gate
    and up of experts are two matrices where the family has one; F32 only.
    """
    s = sizes or Sizes()
    w = Writer(s, seed, weight_type, expert_type or weight_type)
    keys = {
        "context_length": 512,
        "embedding_length": s.embd,
        "block_count": s.layers,
        "feed_forward_length": s.dense,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": s.head_dim,
        "rope.freq_base": 100000.0,
        "expert_count": s.experts,
        "expert_used_count": s.used,
    }
    keys |= _own_metadata(arch, s) | (metadata or {})
    values = {"general.architecture": arch, "general.name": f"tiny random {arch}"}
    values |= {f"{arch}.{key}": value for key, value in keys.items() if value is not None} | bpe_vocab()
    n_vocab = len(values["tokenizer.ggml.tokens"])
    tensors: dict[str, Tensor] = {
        "token_embd.weight": random_tensor(w.rng, (n_vocab, s.embd), "F32", 0.3),
        "output_norm.weight": w.norm(s.embd),
        "output.weight": w.weight(n_vocab, s.embd),
    }
    if arch == "gemma4":
        tensors["rope_freqs.weight"] = 2 * w.norm(s.head_dim // 2)
    for layer in range(keys["block_count"]):
        made = LAYERS[arch](w, layer) | (w.head_norms() if head_norms else {})
        if apart:
            both = made.pop("ffn_gate_up_exps.weight")
            halves = np.split(both, 2, axis=1)
            made |= {f"ffn_{n}_exps.weight": half for n, half in zip(("gate", "up"), halves, strict=True)}
        kept = [name for name in made if not name.endswith(without or "\0")]
        tensors |= {f"blk.{layer}.{name}": made[name] for name in kept}
    return write_gguf(path, values, tensors)


__all__ = ["LAYERS", "Sizes", "tiny_experts"]
