"""The feed-forward of a mixture of experts, in plain ggml operators.

    p = softmax(router norm(x));  the U most probable experts of a token (of equals the lowest id) are used
    x + sum over them of  p_e / (sum of their p)  *  down_e(activation(gate_e norm(x)) * up_e norm(x))

Source: Mixtral (arXiv 2401.04088), Qwen3 (arXiv 2505.09388); build_moe_ffn of llama.cpp. ggml sorts stably
up to 16 experts only; beyond, which of equals is used is up to the device.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from backends.ggml.lib import WORD_NB, word_of

if TYPE_CHECKING:
    from backends.ggml.graph import GraphBuilder

SMALLEST_SUM = 2.0**-14  # of the used experts' probabilities, so that nothing is divided by zero


class ExpertWeights(NamedTuple):
    """Tensor names of one layer; gate, up and down are [row length, rows, experts]."""

    norm: str
    router: str
    gate: str
    up: str
    down: str


def expert_weights(layer: int) -> ExpertWeights:
    names = ("norm", "gate_inp", "gate_exps", "up_exps", "down_exps")
    return ExpertWeights(*(f"blk.{layer}.ffn_{name}.weight" for name in names))


def expert_group(name: str) -> tuple[str, ...]:
    """The matrices of the layer's mixture, if the named tensor is one of them; else none."""
    match = re.fullmatch(r"blk\.(\d+)\.ffn_(gate_inp|(gate|up|down)_exps)\.weight", name)
    return expert_weights(int(match[1]))[1:] if match else ()


def build_experts(g: GraphBuilder, layer: int, x: int) -> int:
    """[n_embd, T] for x [n_embd, T]."""
    lib, ctx, c, w = g.lib, g.context, g.config, expert_weights(layer)
    used, rows = c.n_expert_used, g.rows_of(x)
    normed = g.norm(x, w.norm)
    chances = lib.soft_max(ctx, g.linear(normed, w.router))
    ids = lib.argsort_top_k(ctx, chances, used)
    chosen = lib.get_rows(ctx, lib.reshape_3d(ctx, chances, 1, c.n_expert, rows), ids)
    chosen = lib.reshape_2d(ctx, chosen, used, rows)
    total = lib.clamp(ctx, lib.sum_rows(ctx, chosen), SMALLEST_SUM, float("inf"))
    shares = lib.reshape_3d(ctx, lib.div(ctx, chosen, total), 1, used, rows)

    def multiply(weight: str, inputs: int) -> int:
        return lib.mul_mat_id(ctx, g.weights.tensor(weight), inputs, ids)

    normed = lib.reshape_3d(ctx, normed, c.n_embd, 1, rows)
    active = g.activate(multiply(w.gate, normed), multiply(w.up, normed))
    outputs = lib.mul(ctx, multiply(w.down, active), shares)  # [n_embd, used, T]
    to_slot, to_row, size = (word_of(outputs, WORD_NB + i) for i in (1, 2, 3))
    slots = [
        lib.view_4d(ctx, outputs, c.n_embd, rows, 1, 1, to_row, size, size, slot * to_slot)
        for slot in range(used)
    ]
    summed = slots[0]
    for slot in slots[1:]:
        summed = g.add(summed, slot)
    return g.add(summed, x)
