"""Tiny random models of every dense family: a line of tensors each, and what their metadata must say.

Written from llama.cpp's sources (src/models), not from our table: libllama refuses a file with a tensor too
few or too many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf_tools import Raw, write_gguf
from tiny_models import bpe_vocab, random_tensor

_ATTENTION, _FFN = "attn_norm attn_q attn_k attn_v attn_output", "ffn_norm ffn_gate ffn_up ffn_down"
_BIASED = "attn_norm attn_q+ attn_k+ attn_v+ attn_output"
LAYER_INPUT = 32  # width, of models that have inputs for each layer
_POST = "post_attention_norm post_ffw_norm"

# tensors of a block; + for one with a bias, 2 for gate and up in one, "row" for a norm of all heads at once
LAYERS = {
    "llama": f"{_ATTENTION} {_FFN}",
    "mistral3": f"{_ATTENTION} {_FFN}",
    "qwen2": f"{_BIASED} {_FFN}",
    "qwen3": f"{_ATTENTION} attn_q_norm attn_k_norm {_FFN}",
    "gemma2": f"{_ATTENTION} {_FFN} {_POST}",
    "gemma3": f"{_ATTENTION} attn_q_norm attn_k_norm {_FFN} {_POST}",
    "gemma4": f"{_ATTENTION} attn_q_norm attn_k_norm {_FFN} {_POST} layer_output_scale",
    "phi3": "attn_norm attn_qkv attn_output ffn_norm ffn_up2 ffn_down",
    "granite": f"{_ATTENTION} {_FFN}",
    "glm4": f"{_BIASED} ffn_norm ffn_up2 ffn_down {_POST}",
    "starcoder2": "attn_norm+ attn_q+ attn_k+ attn_v+ attn_output+ ffn_norm+ ffn_up+ ffn_down+",
    "olmo2": "attn_q attn_k attn_v attn_output attn_q_norm:row attn_k_norm:row ffn_gate ffn_up ffn_down "
    + _POST,
    "smollm3": f"{_ATTENTION} {_FFN}",
    "seed_oss": f"{_BIASED} post_attention_norm ffn_gate ffn_up ffn_down",
    "cohere2": f"{_ATTENTION} ffn_gate ffn_up ffn_down",
}
REQUIRED: dict[str, dict[str, Any]] = {
    "gemma2": {
        "attention.sliding_window": 16,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {"attention.sliding_window": 16, "final_logit_softcapping": 3.0},
    "granite": {
        "logit_scale": 3.0,
        "residual_scale": 0.4,
        "embedding_scale": 2.5,
        "attention.scale": 0.4,
    },
    "phi3": {"rope.dimension_count": 16},
    "glm4": {"rope.dimension_count": 8},
    "gemma4": {"attention.sliding_window": 16, "embedding_length_per_layer_input": 0},
    "cohere2": {"attention.sliding_window": 16, "logit_scale": 0.3},
}
# norms that keep unscaled scores small, so that rounded keys do not matter more than elsewhere
SHARP = {("gemma4", f"attn_{part}_norm"): 0.4 for part in "qk"}
LAYER_NORM = ("starcoder2", "cohere2")
UNTIED = ("olmo2",)


def _shapes(n_embd: int, n_heads: int, dim: int, n_kv_heads: int, n_ff: int) -> dict[str, tuple[int, ...]]:
    """Of a block's tensors that are not as wide as the block."""
    q, kv = n_heads * dim, n_kv_heads * dim
    return {
        "attn_q": (q, n_embd),
        "attn_k": (kv, n_embd),
        "attn_v": (kv, n_embd),
        "attn_qkv": (q + 2 * kv, n_embd),
        "attn_output": (n_embd, q),
        "attn_q_norm": (dim,),
        "attn_k_norm": (dim,),
        "attn_q_norm:row": (q,),
        "attn_k_norm:row": (kv,),
        "ffn_gate": (n_ff, n_embd),
        "ffn_up": (n_ff, n_embd),
        "ffn_up2": (2 * n_ff, n_embd),
        "ffn_down": (n_embd, n_ff),
        "layer_output_scale": (1,),
        "inp_gate": (LAYER_INPUT, n_embd),
        "proj": (n_embd, LAYER_INPUT),
    }


def _metadata(
    arch: str, n_layers: int, n_embd: int, n_heads: int, n_kv_heads: int, n_ff: int | list[int]
) -> dict[str, Any]:
    """Without the family's name."""
    return {
        "context_length": 512,
        "embedding_length": n_embd,
        "block_count": n_layers,
        "feed_forward_length": n_ff,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "rope.freq_base": 10000.0,
        f"attention.layer_norm_{'' if arch in LAYER_NORM else 'rms_'}epsilon": 1e-5,
        **REQUIRED.get(arch, {}),
    }


def tiny_family(
    path: Path,
    arch: str,
    metadata: Mapping[str, Any] | None = None,
    *,
    layers: str | Sequence[str] = "",
    heads: Sequence[tuple[int, int]] = (),
    extra: dict[str, tuple[int, ...]] | None = None,
    seed: int = 0,
    n_layers: int = 2,
    n_embd: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    n_ff: int | Sequence[int] = 96,
    weight_type: str = "F32",
) -> Path:
    """Write a random model and return `path`. `metadata`: keys without the family's name, added or changed.
    `layers`: in place of the family's line, or one for each layer; `heads`: width of the heads and number of
    KV heads of each layer, where they differ, `n_ff` may be one for each, too; `extra`: shapes of tensors
    beside the blocks, row length last.
    """
    rng = np.random.default_rng(seed)
    widths = [n_ff] * n_layers if isinstance(n_ff, int) else list(n_ff)
    ff = n_ff if isinstance(n_ff, int) else widths
    values = _metadata(arch, n_layers, n_embd, n_heads, n_kv_heads, ff) | dict(metadata or {})
    vocabulary = bpe_vocab()
    n_vocab = len(vocabulary["tokenizer.ggml.tokens"])

    def vector(size: int, middle: float) -> np.ndarray:
        return (middle + 0.3 * rng.standard_normal(size)).astype(np.float32)

    tensors: dict[str, Raw | np.ndarray] = {
        "token_embd.weight": random_tensor(rng, (n_vocab, n_embd), "F32", 0.3),
        "output_norm.weight": vector(n_embd, 1.0),
    }
    if arch == "starcoder2":
        tensors["output_norm.bias"] = vector(n_embd, 0.0)
    if arch in UNTIED:
        tensors["output.weight"] = random_tensor(rng, (n_vocab, n_embd), "F32", n_embd**-0.5)
    for name, shape in (extra or {}).items():
        middle = 0.0 if name.endswith(".bias") else 2.0
        is_vector = len(shape) == 1
        tensors[name] = (
            vector(shape[0], middle) if is_vector else random_tensor(rng, shape, "F32", shape[-1] ** -0.5)
        )
    for layer in range(n_layers):
        dim, kv_heads = heads[layer] if heads else (n_embd // n_heads, n_kv_heads)
        shapes = _shapes(n_embd, n_heads, dim, kv_heads, widths[layer])
        line = layers if isinstance(layers, str) else layers[layer]
        for item in (line or LAYERS[arch]).split():
            shape = shapes.get(item.rstrip("+"), (n_embd,))
            name = f"blk.{layer}.{item.rstrip('+2').removesuffix(':row')}"
            tensors[f"{name}.weight"] = (
                vector(shape[0], SHARP.get((arch, item), 1.0))
                if len(shape) == 1
                else random_tensor(rng, shape, weight_type, shape[-1] ** -0.5)
            )
            if item.endswith("+"):
                tensors[f"{name}.bias"] = vector(shape[0], 0.0)
    prefixed = {f"{arch}.{key}": value for key, value in values.items()}
    head = {"general.architecture": arch, "general.name": "tiny"}
    return write_gguf(path, head | prefixed | vocabulary, tensors)
