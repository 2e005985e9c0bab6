"""Tiny random models with recurrent layers, that libllama loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf_tools import Raw, write_gguf
from tiny_models import bpe_vocab, random_tensor

Tensors = dict[str, Raw | np.ndarray]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model; every `every`-th layer attends."""

    n_layers: int = 4
    n_embd: int = 64
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 16
    n_rot: int = 8
    state_dim: int = 16
    key_heads: int = 2
    value_heads: int = 4
    taps: int = 4
    n_ff: int = 128
    n_ctx: int = 512
    every: int = 4
    n_experts: int = 6
    n_experts_used: int = 2
    n_ff_expert: int = 32

    @property
    def values_width(self) -> int:
        return self.state_dim * self.value_heads

    @property
    def conv_width(self) -> int:
        return self.state_dim * (2 * self.key_heads + self.value_heads)


def tiny_hybrid(
    path: Path,
    arch: str = "qwen35",
    seed: int = 0,
    *,
    tied: bool = False,
    weight_type: str = "F32",
    metadata: dict[str, Any] | None = None,
    **sizes: int,
) -> Path:
    """Write a random `qwen35` or `qwen35moe` model and return `path`. `sizes` as in Sizes."""
    s, make = Sizes(**sizes), _Maker(np.random.default_rng(seed), weight_type)
    values = {**_metadata(arch, s), **bpe_vocab(), **(metadata or {})}
    n_vocab = len(values["tokenizer.ggml.tokens"])
    tensors: Tensors = {
        "token_embd.weight": make.dense(0.3, n_vocab, s.n_embd),
        "output_norm.weight": make.norm(s.n_embd),
    }
    if not tied:
        tensors["output.weight"] = make.weight(n_vocab, s.n_embd)
    for layer in range(s.n_layers):
        parts = make.attention(s) if (layer + 1) % s.every == 0 else make.delta_net(s)
        parts |= {"attn_norm.weight": make.norm(s.n_embd), "post_attention_norm.weight": make.norm(s.n_embd)}
        parts |= make.experts(s) if arch == "qwen35moe" else make.feed_forward(s)
        tensors.update({f"blk.{layer}.{name}": tensor for name, tensor in parts.items()})
    return write_gguf(path, values, tensors)


def _metadata(arch: str, s: Sizes) -> dict[str, Any]:
    values: dict[str, Any] = {
        "context_length": s.n_ctx,
        "embedding_length": s.n_embd,
        "block_count": s.n_layers,
        "feed_forward_length": s.n_ff,
        "attention.head_count": s.n_heads,
        "attention.head_count_kv": s.n_kv_heads,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1000000.0,
        "rope.dimension_count": s.n_rot,
        "rope.dimension_sections": np.array([2, 1, 1, 0], np.int32),
        "full_attention_interval": s.every,
        "ssm.conv_kernel": s.taps,
        "ssm.inner_size": s.values_width,
        "ssm.state_size": s.state_dim,
        "ssm.time_step_rank": s.value_heads,
        "ssm.group_count": s.key_heads,
    }
    if arch == "qwen35moe":
        values |= {
            "expert_count": s.n_experts,
            "expert_used_count": s.n_experts_used,
            "expert_feed_forward_length": s.n_ff_expert,
            "expert_shared_feed_forward_length": 2 * s.n_ff_expert,
        }
    head = {"general.architecture": arch, "general.name": f"tiny random {arch}"}
    return head | {f"{arch}.{key}": value for key, value in values.items()}


class _Maker:
    """Random tensors by name, without `blk.N.`."""

    def __init__(self, rng: np.random.Generator, weight_type: str):
        self.rng, self.weight_type = rng, weight_type

    def weight(self, *shape: int) -> Raw | np.ndarray:
        return random_tensor(self.rng, shape, self.weight_type, shape[-1] ** -0.5)

    def dense(self, scale: float, *shape: int) -> Raw | np.ndarray:
        """What quantizers leave alone."""
        return random_tensor(self.rng, shape, "F32", scale)

    def norm(self, size: int) -> np.ndarray:
        return (1 + 0.2 * self.rng.standard_normal(size)).astype(np.float32)

    def attention(self, s: Sizes) -> Tensors:
        return {
            "attn_q.weight": self.weight(2 * s.n_heads * s.head_dim, s.n_embd),
            "attn_k.weight": self.weight(s.n_kv_heads * s.head_dim, s.n_embd),
            "attn_v.weight": self.weight(s.n_kv_heads * s.head_dim, s.n_embd),
            "attn_output.weight": self.weight(s.n_embd, s.n_heads * s.head_dim),
            "attn_q_norm.weight": self.norm(s.head_dim),
            "attn_k_norm.weight": self.norm(s.head_dim),
        }

    def delta_net(self, s: Sizes) -> Tensors:
        return {
            "attn_qkv.weight": self.weight(s.conv_width, s.n_embd),
            "attn_gate.weight": self.weight(s.values_width, s.n_embd),
            "ssm_alpha.weight": self.weight(s.value_heads, s.n_embd),
            "ssm_beta.weight": self.weight(s.value_heads, s.n_embd),
            "ssm_conv1d.weight": self.dense(0.5, s.conv_width, s.taps),
            "ssm_dt.bias": (0.5 * self.rng.standard_normal(s.value_heads)).astype(np.float32),
            "ssm_a": -self.rng.uniform(0.02, 0.5, s.value_heads).astype(np.float32),
            "ssm_norm.weight": self.norm(s.state_dim),
            "ssm_out.weight": self.weight(s.n_embd, s.values_width),
        }

    def feed_forward(self, s: Sizes) -> Tensors:
        return {
            "ffn_gate.weight": self.weight(s.n_ff, s.n_embd),
            "ffn_up.weight": self.weight(s.n_ff, s.n_embd),
            "ffn_down.weight": self.weight(s.n_embd, s.n_ff),
        }

    def experts(self, s: Sizes) -> Tensors:
        sharp = 2 * s.n_embd**-0.5  # clear choices
        return {
            "ffn_gate_inp.weight": self.dense(sharp, s.n_experts, s.n_embd),
            "ffn_gate_exps.weight": self.weight(s.n_experts, s.n_ff_expert, s.n_embd),
            "ffn_up_exps.weight": self.weight(s.n_experts, s.n_ff_expert, s.n_embd),
            "ffn_down_exps.weight": self.weight(s.n_experts, s.n_embd, s.n_ff_expert),
            "ffn_gate_inp_shexp.weight": self.dense(sharp, s.n_embd),
            "ffn_gate_shexp.weight": self.weight(2 * s.n_ff_expert, s.n_embd),
            "ffn_up_shexp.weight": self.weight(2 * s.n_ff_expert, s.n_embd),
            "ffn_down_shexp.weight": self.weight(s.n_embd, 2 * s.n_ff_expert),
        }
