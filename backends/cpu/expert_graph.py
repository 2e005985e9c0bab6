"""The ggml nodes of a mixture of experts on the CPU, by our own kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from backends.cpu import arranging, experts, linear, matmul, routing
from backends.cpu import expert_words as E
from backends.cpu.packed import PackedWeight
from backends.ggml.models.mixture import ExpertWeights
from backends.ggml.models.tensors import EXPERT_SCALE, ROUTER_SCALE, bias_of

if TYPE_CHECKING:
    from backends.cpu.graph import CpuGraphBuilder

MODES = {"silu": linear.SILU, "gelu": linear.GELU, "oai": linear.OAI}  # by a family's activation


def build(g: CpuGraphBuilder, layer: int, x: int, w: ExpertWeights, residual: bool) -> int:
    """Six nodes: norm + quantize, router, route, arrange, gate|up + activation + quantize, down + sum; seven
    where the router has a norm of its own.

    All matrices must be packed. With `residual` the result is x plus what the experts make of it.
    """
    m, gates, down = g.config.mixture, [g.packed[w.gate], g.packed[w.up]], g.packed[w.down]
    assert m is not None
    rows = g.rows_of(x)
    shared: tuple[str, ...] = (w.router, w.gate, w.up)
    if m.options.beside:
        shared = (w.gate, w.up)
        routed = g._quantize(
            x, linear.NORM, (w.router,), f"blk.{layer}.{ROUTER_SCALE}", g.config.n_embd**-0.5
        )
        logits = g._multiply(routed, x, (w.router,), None)
        tokens = g._quantize(x, linear.NORM, shared, w.norm)
    else:
        tokens = g._quantize(x, linear.NORM, shared, w.norm)
        logits = g._multiply(tokens, x, (w.router,), None, shared)
    p = _parameters(g, (w.gate, w.up), gates[0].k, m.width)
    p[E.P_SOURCE_KINDS] = linear.kind_bits(g.packed[name].kind for name in shared)
    p[E.P_KIND], p[E.P_COUNTER] = down.kind, g.kv.header.expert_counter_address(layer)
    p[E.P_MODE] = MODES[g.config.family.activation]
    _choose(g, layer, p)
    routes = g.custom(2 * m.used, rows, (logits,), routing.route_operator.address, p)
    words = m.used * int(p[E.P_ROW]) // 4 + arranging.table_words(m.used)
    arranged = g.custom(words, rows, (tokens, routes), arranging.arrange_operator.address, p)
    words = m.used * matmul.activation_nbytes(down.kind, 1, down.k) // 4
    active = g.custom(words, rows, (arranged,), experts.gate_operator.address, p)
    q = _parameters(g, (w.down,), down.k, down.m)
    q[E.P_ROW] = p[E.P_ROW]
    sources = (active, arranged, x) if residual else (active, arranged)
    return g.custom(down.m, rows, sources, experts.down_operator.address, q)


def _choose(g: CpuGraphBuilder, layer: int, p: np.ndarray) -> None:
    """Which experts tokens go to, and with which shares."""
    m = g.config.mixture
    assert m is not None
    p[E.P_GATING], p[E.P_NORMED] = E.GATINGS[m.gating], int(m.normed)
    p[E.P_SCALE] = int(np.float32(m.scale * g.config.residual_scale).view(np.int32))
    p[E.P_GROUPS], p[E.P_GROUPS_USED] = m.groups, m.groups_used
    if m.options.selection_bias:
        p[E.P_SELECTION_BIAS] = g.lib.get_data(g.weights.tensor(f"blk.{layer}.exp_probs_b.bias"))
    scales = f"blk.{layer}.{EXPERT_SCALE}"
    if scales in g.weights:
        p[E.P_EXPERT_SCALES] = g.lib.get_data(g.weights.tensor(scales))


def _parameters(g: CpuGraphBuilder, names: Sequence[str], k: int, width: int) -> np.ndarray:
    """What the operators have in common."""
    m, matrices = g.config.mixture, [g.packed[name] for name in names]
    assert m is not None
    p = g._new_parameters(E.P_MATRICES + experts.MATRIX_WORDS * len(matrices))
    p[E.P_COUNT_AT], p[E.P_SCRATCH] = g._count_at, g.kv.expert_scratch.ctypes.data
    p[E.P_EXPERTS], p[E.P_USED], p[E.P_K], p[E.P_WIDTH] = m.count, m.used, k, width
    sizes = {kind: matmul.activation_nbytes(kind, 1, k) for kind in {w.kind for w in matrices}}
    p[E.P_KINDS], p[E.P_ROW] = linear.kind_bits(sizes), sum(sizes.values())
    for i, (name, w) in enumerate(zip(names, matrices, strict=True)):
        words = p[E.P_MATRICES + experts.MATRIX_WORDS * i :]
        _matrix_words(words, w, sizes)
        if i and name == names[0]:  # the lower half of one tensor
            words[experts.W_PACKED] += matmul.packed_nbytes(w.type_id, width, w.k)
        if m.options.biases:
            words[experts.W_BIAS] = g.lib.get_data(g.weights.tensor(bias_of(name)))
    return p


def _matrix_words(words: np.ndarray, w: PackedWeight, sizes: dict[int, int]) -> None:
    """`sizes`: bytes of a row of activations, by kind."""
    words[experts.W_FUNCTION] = matmul.compiled_matmul(w.type_id).address
    words[experts.W_PACKED], words[experts.W_EXPERT] = w.data.ctypes.data, w.expert_nbytes
    words[experts.W_PANEL] = matmul.packed_nbytes(w.type_id, 1, w.k)
    words[experts.W_OFFSET] = sum(size for kind, size in sizes.items() if kind < w.kind)
    words[experts.W_ROW] = sizes[w.kind]


__all__ = ["build"]
