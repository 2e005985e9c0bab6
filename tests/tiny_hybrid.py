"""Tiny random models with recurrent layers, that libllama loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf_tools import Raw, write_gguf
from tiny_models import bpe_vocab, random_tensor


def tiny_hybrid(
    path: Path,
    arch: str = "qwen35",
    seed: int = 0,
    *,
    n_layers: int = 4,
    n_embd: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 16,
    n_rot: int = 8,
    state_dim: int = 16,
    key_heads: int = 2,
    value_heads: int = 4,
    taps: int = 4,
    n_ff: int = 128,
    n_ctx: int = 512,
    every: int = 4,
    tied: bool = False,
    weight_type: str = "F32",
    n_experts: int = 6,
    n_experts_used: int = 2,
    n_ff_expert: int = 32,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write a random `qwen35` or `qwen35moe` model, of which every n-th layer attends, and return `path`."""
    rng = np.random.default_rng(seed)
    values_width, conv_width = state_dim * value_heads, state_dim * (2 * key_heads + value_heads)
    values = {
        "general.architecture": arch,
        "general.name": f"tiny random {arch}",
        f"{arch}.context_length": n_ctx,
        f"{arch}.embedding_length": n_embd,
        f"{arch}.block_count": n_layers,
        f"{arch}.feed_forward_length": n_ff,
        f"{arch}.attention.head_count": n_heads,
        f"{arch}.attention.head_count_kv": n_kv_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 1000000.0,
        f"{arch}.rope.dimension_count": n_rot,
        f"{arch}.rope.dimension_sections": np.array([2, 1, 1, 0], np.int32),
        f"{arch}.full_attention_interval": every,
        f"{arch}.ssm.conv_kernel": taps,
        f"{arch}.ssm.inner_size": values_width,
        f"{arch}.ssm.state_size": state_dim,
        f"{arch}.ssm.time_step_rank": value_heads,
        f"{arch}.ssm.group_count": key_heads,
        **(
            {
                f"{arch}.expert_count": n_experts,
                f"{arch}.expert_used_count": n_experts_used,
                f"{arch}.expert_feed_forward_length": n_ff_expert,
                f"{arch}.expert_shared_feed_forward_length": 2 * n_ff_expert,
            }
            if arch == "qwen35moe"
            else {}
        ),
        **bpe_vocab(),
        **(metadata or {}),
    }

    def weight(*shape: int) -> Raw | np.ndarray:
        return random_tensor(rng, shape, weight_type, shape[-1] ** -0.5)

    def norm(size: int) -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)

    n_vocab = len(values["tokenizer.ggml.tokens"])
    tensors: dict[str, Raw | np.ndarray] = {
        "token_embd.weight": random_tensor(rng, (n_vocab, n_embd), "F32", 0.3),
        "output_norm.weight": norm(n_embd),
    }
    if not tied:
        tensors["output.weight"] = weight(n_vocab, n_embd)
    for layer in range(n_layers):
        if (layer + 1) % every == 0:
            parts = {
                "attn_q.weight": weight(2 * n_heads * head_dim, n_embd),
                "attn_k.weight": weight(n_kv_heads * head_dim, n_embd),
                "attn_v.weight": weight(n_kv_heads * head_dim, n_embd),
                "attn_output.weight": weight(n_embd, n_heads * head_dim),
                "attn_q_norm.weight": norm(head_dim),
                "attn_k_norm.weight": norm(head_dim),
            }
        else:
            parts = {
                "attn_qkv.weight": weight(conv_width, n_embd),
                "attn_gate.weight": weight(values_width, n_embd),
                "ssm_alpha.weight": weight(value_heads, n_embd),
                "ssm_beta.weight": weight(value_heads, n_embd),
                "ssm_conv1d.weight": random_tensor(rng, (conv_width, taps), "F32", 0.5),
                "ssm_dt.bias": (0.5 * rng.standard_normal(value_heads)).astype(np.float32),
                "ssm_a": -rng.uniform(0.02, 0.5, value_heads).astype(np.float32),
                "ssm_norm.weight": norm(state_dim),
                "ssm_out.weight": weight(n_embd, values_width),
            }
        parts |= {"attn_norm.weight": norm(n_embd), "post_attention_norm.weight": norm(n_embd)}
        if arch == "qwen35moe":
            parts |= {
                "ffn_gate_inp.weight": random_tensor(rng, (n_experts, n_embd), "F32", 2 * n_embd**-0.5),
                "ffn_gate_exps.weight": weight(n_experts, n_ff_expert, n_embd),
                "ffn_up_exps.weight": weight(n_experts, n_ff_expert, n_embd),
                "ffn_down_exps.weight": weight(n_experts, n_embd, n_ff_expert),
                "ffn_gate_inp_shexp.weight": random_tensor(rng, (n_embd,), "F32", 2 * n_embd**-0.5),
                "ffn_gate_shexp.weight": weight(2 * n_ff_expert, n_embd),
                "ffn_up_shexp.weight": weight(2 * n_ff_expert, n_embd),
                "ffn_down_shexp.weight": weight(n_embd, 2 * n_ff_expert),
            }
        else:
            parts |= {
                "ffn_gate.weight": weight(n_ff, n_embd),
                "ffn_up.weight": weight(n_ff, n_embd),
                "ffn_down.weight": weight(n_embd, n_ff),
            }
        tensors.update({f"blk.{layer}.{name}": tensor for name, tensor in parts.items()})
    return write_gguf(path, values, tensors)
