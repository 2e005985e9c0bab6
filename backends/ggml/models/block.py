"""The graph of a transformer block, for all families that differ only by `Family` options; and the head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backends.ggml.graph import GraphBuilder
from backends.ggml.models.layer_inputs import add_layer_input
from backends.ggml.models.tensors import (
    FUSED_QKV,
    OUTPUT_NORM,
    has_fused_qkv,
    has_keys_as_values,
    output_scale,
)

FFN_INPUTS = {"gated": ("ffn_gate", "ffn_up"), "fused": ("ffn_up",), "plain": ("ffn_up",)}


def build_block(g: GraphBuilder, layer: int, x: int, keep: int | None) -> int:
    """One block: attention, then the feed-forward or that of experts, each around a residual; or both beside
    each other.

    `x` is [n_embd, T]. `keep` names the rows that are needed from here on (in the last layer, those
    whose logits are wanted), None for all.
    """
    c, family = g.config, g.config.family

    def w(name: str) -> str:
        return f"blk.{layer}.{name}.weight"

    source, norm = x, w("attn_norm") if family.pre_norms else None
    if family.parallel:
        source, norm = g.norm(x, w("attn_norm")), None
    attended, output = _mix(g, layer, source, norm), w("ssm_out" if c.is_recurrent(layer) else "attn_output")
    if keep is not None:
        attended, x = g.select(attended, keep), g.select(x, keep)
        source = g.select(source, keep) if family.parallel else x
    inputs, down = [w(name) for name in FFN_INPUTS[family.ffn]], w("ffn_down")
    if family.parallel:
        x = g.linear(attended, output, residual=x)
        return g.feed_forward(source, None, inputs, down, residual=x)
    post = [w(n) if family.post_norms else None for n in ("post_attention_norm", "post_ffw_norm")]
    x = _add(g, x, post[0], lambda residual: g.linear(attended, output, residual))
    ffn_norm = w(family.ffn_norm) if family.pre_norms else None

    def feed_forward(residual: int | None) -> int:
        if not c.has_experts_beside(layer):
            return g.feed_forward(x, ffn_norm, inputs, down, residual)
        dense = g.norm(g.feed_forward(x, ffn_norm, inputs, down, None), w("post_ffw_norm_1"))
        return g.add(dense, g.norm(g.mixture(layer, x, residual=False), w("post_ffw_norm_2")))

    if c.has_experts(layer) and not c.has_experts_beside(layer):
        x = g.expert_ffn(layer, x)
    else:
        x = _add(g, x, post[1], feed_forward)
    if c.layer_input:
        x = add_layer_input(g, layer, x, keep)
    scale = output_scale(c, layer)
    return x if scale is None else g.scaled_by(x, scale)


def _mix(g: GraphBuilder, layer: int, x: int, norm: str | None) -> int:
    """What each row takes from those before it, as the output matrix reads it."""
    if g.config.is_recurrent(layer):
        return g.recurrent(layer, x, norm)
    projections = _projections(g, layer, x, norm)
    gated = g.config.family.gated_attention
    return g.gated_attention(layer, projections) if gated else g.attention(layer, projections)


def _projections(g: GraphBuilder, layer: int, x: int, norm: str | None) -> Sequence[int]:
    """Query, key and value of each row, as GraphBuilder.attention takes them."""
    names = (FUSED_QKV,) if has_fused_qkv(g.config, layer) else ("attn_q", "attn_k", "attn_v")
    if has_keys_as_values(g.config, layer):
        names = ("attn_q", "attn_k", "attn_k")
    if g.config.shares_kv(layer):
        names = ("attn_q",)
    weights = [f"blk.{layer}.{name}.weight" for name in names]
    if g.config.family.qk_norm != "row":
        return g.norm_linear(x, norm, weights)
    q, k, v = g.norm_linear(x, norm, weights, apart=True)
    norms = (f"blk.{layer}.attn_{part}_norm.weight" for part in "qk")
    return [*(g.norm(part, weight) for part, weight in zip((q, k), norms, strict=True)), v]


def _add(g: GraphBuilder, x: int, post_norm: str | None, sublayer: Callable[[int | None], int]) -> int:
    """x plus what the sublayer gives, normed and scaled where the model does; else it adds x itself."""
    scale = g.config.residual_scale
    if post_norm is None and scale == 1.0:
        return sublayer(x)
    y = sublayer(None)
    if post_norm is not None:
        y = g.norm(y, post_norm)
    return g.add(g.scaled(y, scale), x)


def build_head(g: GraphBuilder, x: int, weight: str) -> int:
    """Logits [n_vocab, T] by the output matrix."""
    (logits,) = g.norm_linear(x, OUTPUT_NORM, (weight,))
    return g.soft_capped(g.scaled(logits, g.config.logit_scale), g.config.logit_softcap)


def build_embeddings(g: GraphBuilder, x: int) -> int:
    """Rows [n_embd, T] behind the last norm: what the output matrix multiplies."""
    return g.norm(x, OUTPUT_NORM)


__all__ = ["build_block", "build_embeddings", "build_head"]
