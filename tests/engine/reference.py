"""The model families in plain numpy, float64: what the graphs must compute, with and without f16 KV."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from reference_experts import mixture

from backends.ggml.models import ModelConfig, Rope
from quant.gguf import GGUFFile

Rounded = Callable[[np.ndarray], np.ndarray]  # what is left of values that were kept in some format


def forward(
    gguf: GGUFFile,
    config: ModelConfig,
    ids: list[int],
    kv_dtype: type = np.float64,
    gelu_table: bool = False,
    kept: tuple[Rounded, Rounded] | None = None,
    weights: dict[str, np.ndarray] | None = None,
) -> np.ndarray:
    """Logits [len(ids), n_vocab] of an F32 model; keys and values are rounded to `kv_dtype`, or as `kept`
    says of keys and of values, float64 [T, heads, dim] each. `weights` are taken in place of the file's.
    """
    w = weights or {n: _tensor(gguf, n) for n in gguf.tensors}
    c, family = config, config.family
    x = w["token_embd.weight"][ids] * c.embedding_scale

    def norm(v: np.ndarray, name: str) -> np.ndarray:
        return v / np.sqrt((v**2).mean(-1, keepdims=True) + c.norm_eps) * w[f"{name}.weight"]

    for layer in range(c.n_layer):
        b = f"blk.{layer}."
        h = norm(x, b + "attn_norm")
        q, k, v = (
            (h @ w[f"{b}attn_{p}.weight"].T).reshape(len(ids), heads, -1)
            for p, heads in (("q", c.n_head), ("k", c.n_head_kv), ("v", c.n_head_kv))
        )
        if family.qk_norm == "heads":
            q, k = norm(q, b + "attn_q_norm"), norm(k, b + "attn_k_norm")
        rope = c.rope_of(layer)
        factors = w[rope.factors] if rope.factors else None
        q, k = _rotate(q, rope, factors), _rotate(k, rope, factors)
        if kept is not None:
            k, v = kept[0](k), kept[1](v)
        else:
            k, v = k.astype(kv_dtype).astype(np.float64), v.astype(kv_dtype).astype(np.float64)
        a = _attend(q * c.attention_scale, k, v, c.layer_windows[layer]) @ w[b + "attn_output.weight"].T
        x = x + (norm(a, b + "post_attention_norm") if family.post_norms else a)
        h = norm(x, b + "ffn_norm")
        activate = silu if family.activation == "silu" else _gelu_of_ggml if gelu_table else _gelu
        if c.mixture is not None:
            f = mixture(h, w, b, c.mixture, activate)
        else:
            gate, up = h @ w[b + "ffn_gate.weight"].T, h @ w[b + "ffn_up.weight"].T
            f = (activate(gate) * up) @ w[b + "ffn_down.weight"].T
        x = x + (norm(f, b + "post_ffw_norm") if family.post_norms else f)
    return norm(x, "output_norm") @ w.get("output.weight", w["token_embd.weight"]).T


def silu(g: np.ndarray) -> np.ndarray:
    return g / (1 + np.exp(-g))


def _gelu(g: np.ndarray) -> np.ndarray:
    return 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))


def _gelu_of_ggml(g: np.ndarray) -> np.ndarray:
    """ggml looks it up in a table of halfs, for arguments rounded to half."""
    y = _gelu(g.astype(np.float16).astype(np.float64)).astype(np.float16)
    return np.where(g <= -10, 0.0, np.where(g >= 10, g, y.astype(np.float64)))


def _tensor(gguf: GGUFFile, name: str) -> np.ndarray:
    return gguf.tensor_data(name).view(np.float32).reshape(gguf.tensors[name].shape[::-1]).astype(np.float64)


def _rotate(x: np.ndarray, rope: Rope, factors: np.ndarray | None) -> np.ndarray:
    frequencies = rope.scale * rope.base ** (-np.arange(0, rope.n_rot, 2) / rope.n_rot)
    if factors is not None:
        frequencies = frequencies / factors
    angles = np.arange(len(x))[:, None, None] * frequencies
    half = rope.n_rot // 2
    first = np.arange(half) if rope.neox else np.arange(0, rope.n_rot, 2)
    second = first + half if rope.neox else first + 1
    out = x.copy()
    out[..., first] = x[..., first] * np.cos(angles) - x[..., second] * np.sin(angles)
    out[..., second] = x[..., first] * np.sin(angles) + x[..., second] * np.cos(angles)
    return out


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None) -> np.ndarray:
    tokens, heads, _ = q.shape
    share = heads // k.shape[1]
    position = np.arange(tokens)
    hidden = position[None, :] > position[:, None]
    if window is not None:
        hidden |= position[None, :] <= position[:, None] - window
    out = np.empty((tokens, heads, v.shape[-1]))
    for h in range(heads):
        scores = np.where(hidden, -np.inf, q[:, h] @ k[:, h // share].T)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, h] = weights / weights.sum(-1, keepdims=True) @ v[:, h // share]
    return out.reshape(tokens, -1)
