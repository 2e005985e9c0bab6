"""Nodes of a CPU device's graph for recurrent layers and for gated attention, by kernels of our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from backends.cpu import delta_net, gated
from backends.ggml.lib import shape_of
from backends.ggml.models.delta_net import PROJECTIONS

if TYPE_CHECKING:
    from backends.cpu.graph import CpuGraphBuilder


def build_recurrent(g: CpuGraphBuilder, layer: int, x: int, norm: str | None) -> int:
    """See GraphBuilder.recurrent. Three nodes, see delta_net.py."""
    states, sizes = g.states, g.config.delta_net
    assert states is not None and sizes is not None
    sources = g.norm_linear(x, norm, [f"blk.{layer}.{name}.weight" for name in PROJECTIONS])
    widths = [sizes.conv_width, sizes.value_width, sizes.value_heads, sizes.value_heads]
    p = states.parameters(layer, [widths] if len(sources) == 1 else [[width] for width in widths])
    rows, values = g.rows_of(x), sizes.value_width
    mixed_width = sizes.conv_width + 2 * sizes.value_heads
    mixed = g.custom(mixed_width, rows, sources, delta_net.convolve_operator.address, p)
    y = g.custom(values, rows, (mixed,), delta_net.advance_operator.address, p)
    return g.custom(values, rows, (y, *sources), delta_net.gate_operator.address, p)


def build_gated_attention(g: CpuGraphBuilder, layer: int, projections: Sequence[int]) -> int:
    """See GraphBuilder.gated_attention. Two nodes around attention, see gated.py."""
    c, p = g.config, g._new_parameters(gated.NUM_PARAMS)
    keys, values = c.n_head_kv * c.head_dim_k, c.n_head_kv * c.head_dim_v
    p[gated.P_COUNT_AT], p[gated.P_HEADS], p[gated.P_DIM] = g._count_at, c.n_head, c.head_dim_k
    p[gated.P_KEYS], p[gated.P_VALUES], p[gated.P_FUSED] = keys, values, len(projections) == 1
    for i, word in enumerate((gated.P_ROW_Q, gated.P_ROW_K, gated.P_ROW_V)):
        p[word] = 4 * shape_of(projections[min(i, len(projections) - 1)])[0]
    rows, width = g.rows_of(projections[0]), c.n_head * c.head_dim_k
    taken = g.custom(width + keys + values, rows, projections, gated.take_queries_operator.address, p)
    attended = g.attention(layer, [taken])
    return g.custom(width, rows, (attended, projections[0]), gated.gate_heads_operator.address, p)


__all__ = ["build_gated_attention", "build_recurrent"]
