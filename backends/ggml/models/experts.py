"""The feed-forward of a mixture of experts, in plain ggml operators.

    x + sum over the chosen experts e of  share_e * (down_e(activation(gate_e norm(x), up_e norm(x))))
      + perhaps that of one more expert, which all tokens share

What is chosen and how it is weighed: mixture.py. Experts' matrices may have biases. Source: build_moe_ffn of
llama.cpp. ggml sorts stably up to 16 experts only; beyond, which of equals is used is up to the device.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import TYPE_CHECKING

from backends.ggml.lib import WORD_NB, word_of
from backends.ggml.models.mixture import FUSED_EXPERTS, SMALLEST_SUM, Mixture, expert_weights
from backends.ggml.models.tensors import EXPERT_SCALE, ROUTER_SCALE, experts_of

if TYPE_CHECKING:
    from backends.ggml.graph import GraphBuilder


def expert_group(name: str, names: Container[str] = ()) -> tuple[str, ...]:
    """The matrices of the layer's mixture, if the named tensor is one of them; else none. `names`: in the
    file."""
    match = re.fullmatch(r"blk\.(\d+)\.ffn_(gate_inp|(gate|up|gate_up|down)_exps)\.weight", name)
    if match is None:
        return ()
    fused = f"blk.{match[1]}.{FUSED_EXPERTS}.weight" in names
    return expert_weights(int(match[1]), fused=fused)[1:]


def build_expert_ffn(g: GraphBuilder, layer: int, x: int) -> int:
    """[n_embd, T] for x [n_embd, T]."""
    y = g.mixture(layer, x)
    m = g.config.mixture
    assert m is not None
    if not m.shared:
        return y
    norm, scale = expert_weights(layer, g.config.family.ffn_norm).norm, g.config.residual_scale
    gate, up, down = (f"blk.{layer}.ffn_{name}_shexp.weight" for name in ("gate", "up", "down"))
    if not m.options.shared_gate and scale == 1.0:
        return g.feed_forward(x, norm, (gate, up), down, residual=y)
    shared = g.scaled(g.feed_forward(x, norm, (gate, up), down, residual=None), scale)
    if not m.options.shared_gate:
        return g.add(y, shared)
    lib, ctx = g.lib, g.context
    weight = g.weights.tensor(f"blk.{layer}.ffn_gate_inp_shexp.weight")
    # a sum of products, not a matrix of one row: ggml's kernels for those look at the rows beside
    share = lib.sigmoid(ctx, lib.sum_rows(ctx, lib.mul(ctx, g.norm(x, norm), weight)))
    return g.add(y, lib.mul(ctx, shared, share))


def build_mixture(g: GraphBuilder, layer: int, x: int, residual: bool) -> int:
    """What its experts make of x, [n_embd, T]; with `residual` plus x."""
    lib, ctx, c, m = g.lib, g.context, g.config, g.config.mixture
    assert m is not None
    w, rows = experts_of(c, layer), g.rows_of(x)
    normed = routed = g.norm(x, w.norm)
    if m.options.beside:
        routed = g.scaled(g.norm(x, f"blk.{layer}.{ROUTER_SCALE}"), c.n_embd**-0.5)
    ids, shares = _route(g, m, layer, g.linear(routed, w.router))

    normed = lib.reshape_3d(ctx, normed, c.n_embd, 1, rows)
    inputs = dict.fromkeys((w.gate, w.up))  # one where both are in one tensor
    active = g.activate(*(g.expert_linear(normed, name, ids) for name in inputs))
    outputs = lib.mul(ctx, g.expert_linear(active, w.down, ids), shares)  # [n_embd, used, T]
    to_slot, to_row, size = (word_of(outputs, WORD_NB + i) for i in (1, 2, 3))
    slots = [
        lib.view_4d(ctx, outputs, c.n_embd, rows, 1, 1, to_row, size, size, slot * to_slot)
        for slot in range(m.used)
    ]
    summed = slots.pop(0)
    for slot in slots:
        summed = g.add(summed, slot)
    return g.add(summed, x) if residual else lib.cont(ctx, summed)


def _route(g: GraphBuilder, m: Mixture, layer: int, logits: int) -> tuple[int, int]:
    """Ids of the chosen experts int32 [used, T], and their shares [1, used, T]."""
    lib, ctx, rows = g.lib, g.context, g.rows_of(logits)
    chances = logits
    if m.gating != "chosen":
        chances = (lib.soft_max if m.gating == "softmax" else lib.sigmoid)(ctx, logits)
    scores = chances
    if m.options.selection_bias:
        scores = g.add(scores, g.weights.tensor(f"blk.{layer}.exp_probs_b.bias"))
    if m.groups > 1:
        scores = _keep_groups(g, m, scores)
    ids = lib.argsort_top_k(ctx, scores, m.used)
    shares = lib.get_rows(ctx, lib.reshape_3d(ctx, chances, 1, m.count, rows), ids)
    shares = lib.reshape_2d(ctx, shares, m.used, rows)
    if m.gating == "chosen":
        shares = lib.soft_max(ctx, shares)
    if m.normed:
        total = lib.clamp(ctx, lib.sum_rows(ctx, shares), SMALLEST_SUM, float("inf"))
        shares = lib.div(ctx, shares, total)
    shares = lib.reshape_3d(ctx, g.scaled(shares, m.scale * g.config.residual_scale), 1, m.used, rows)
    scale = f"blk.{layer}.{EXPERT_SCALE}"
    if scale in g.weights:
        column = lib.reshape_2d(ctx, g.weights.tensor(scale), 1, m.count)
        flat = lib.reshape_2d(ctx, lib.cont(ctx, ids), m.used * rows, 1)
        chosen = lib.reshape_3d(ctx, lib.get_rows(ctx, column, flat), 1, m.used, rows)
        shares = lib.mul(ctx, shares, chosen)
    return ids, shares


def _keep_groups(g: GraphBuilder, m: Mixture, scores: int) -> int:
    """Minus infinity for the experts of all groups but those whose two best have the highest sums."""
    lib, ctx, rows, size = g.lib, g.context, g.rows_of(scores), m.count // m.groups
    grouped = lib.reshape_3d(ctx, scores, size, m.groups, rows)
    best = lib.get_rows(
        ctx, lib.reshape_4d(ctx, scores, 1, size, m.groups, rows), lib.argsort_top_k(ctx, grouped, 2)
    )
    sums = lib.sum_rows(ctx, lib.reshape_3d(ctx, best, 2, m.groups, rows))
    kept = lib.argsort_top_k(ctx, lib.reshape_2d(ctx, sums, m.groups, rows), m.groups_used)
    rest = lib.fill(ctx, grouped, float("-inf"))
    kept_scores = lib.set_rows(ctx, rest, lib.get_rows(ctx, grouped, kept), kept)
    return lib.reshape_2d(ctx, kept_scores, m.count, rows)
