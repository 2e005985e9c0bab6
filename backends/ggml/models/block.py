"""The graph of a transformer block, for all families that differ only by `Family` options."""

from __future__ import annotations

from backends.ggml.graph import GraphBuilder


def build_block(g: GraphBuilder, layer: int, x: int, keep: int | None) -> int:
    """One block: attention, then the gated feed-forward or that of experts, each around a residual.

    `x` is [n_embd, T]. `keep` names the rows that are needed from here on (in the last layer, those
    whose logits are wanted), None for all.
    """
    post_norms = g.config.family.post_norms

    def w(name: str) -> str:
        return f"blk.{layer}.{name}.weight"

    projections = g.norm_linear(x, w("attn_norm"), (w("attn_q"), w("attn_k"), w("attn_v")))
    attended = g.attention(layer, projections)
    if keep is not None:
        attended, x = g.select(attended, keep), g.select(x, keep)
    if not post_norms:
        x = g.linear(attended, w("attn_output"), residual=x)
        if g.config.n_expert:
            return g.expert_ffn(layer, x)
        return g.gated_ffn(x, w("ffn_norm"), w("ffn_gate"), w("ffn_up"), w("ffn_down"), residual=x)
    x = g.add(x, g.norm(g.linear(attended, w("attn_output")), w("post_attention_norm")))
    ffn = g.gated_ffn(x, w("ffn_norm"), w("ffn_gate"), w("ffn_up"), w("ffn_down"), residual=None)
    return g.add(x, g.norm(ffn, w("post_ffw_norm")))
