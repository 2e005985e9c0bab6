"""Gated delta nets in plain ggml operators, for devices without kernels of ours. See models/delta_net.py.

    inputs <- state | rows of the batch          [channels, taps - 1 + r, n]
    q | k | v = silu(ssm_conv(inputs))
    y, state <- gated_delta_net(q, k, v, decay, b, state)

Batches come in waves (state_layout.py): what a wave leaves in the pools, a later one may begin with, so it
reads through what was written. Everything that differs from step to step with one shape is an input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from backends.ggml.devices import Device
from backends.ggml.lib import TYPE_F32, TYPE_I32, TYPE_I64
from backends.ggml.models.delta_net import PROJECTIONS, DeltaNet
from backends.ggml.state_layout import StateLayout
from backends.ggml.weights import DeviceTensors

if TYPE_CHECKING:
    from backends.ggml.graph import GraphBuilder

NODES = 40  # of a batch in a layer, generously
LAYER_NODES = 40  # beside those


class StatePools:
    """`num_states` slots for each of `layers`, and one more that nobody reads. Slot 0 is zeros for ever.

    conv[layer]    F32 [(taps - 1) channels, slots]       the last inputs, oldest first
    matrix[layer]  F32 [dim dim value heads, slots]       as ggml_gated_delta_net has them
    """

    def __init__(self, sizes: DeltaNet, device: Device, layers: Sequence[int], num_states: int):
        self.sizes, self.layers, self.nowhere = sizes, list(layers), max(1, num_states)
        floats = (sizes.conv_floats, sizes.matrix_floats)
        shapes = [(TYPE_F32, count, self.nowhere + 1) for _ in layers for count in floats]
        self._tensors = DeviceTensors(device, shapes)
        self._tensors.clear()
        self.conv = dict(zip(layers, self._tensors.handles[::2], strict=True))
        self.matrix = dict(zip(layers, self._tensors.handles[1::2], strict=True))

    @property
    def nbytes(self) -> int:
        return self._tensors.nbytes

    def close(self) -> None:
        self._tensors.close()


class _BatchInputs(NamedTuple):
    sequences: int
    rows: int
    order: int
    real: int
    sources: int
    targets: int
    tails: int


class StateInputs:
    """The inputs of a graph that advances states, the same for all its layers."""

    def __init__(self, g: GraphBuilder, pools: StatePools, layout: StateLayout):
        self.pools = pools
        taps = pools.sizes.taps
        self.waves = [
            [
                _BatchInputs(
                    n,
                    r,
                    g.input_i32(n * r),
                    g.input_f32(1, n * r),
                    g.input(TYPE_I32, n),
                    g.input(TYPE_I64, n),
                    g.input_i32(n * (taps - 1)),
                )
                for n, r in wave
            ]
            for wave in layout.waves
        ]
        self.place = g.input_i32(g.rows)

    def set_step(self, layout: StateLayout, upload: Callable[[int, np.ndarray], None]) -> None:
        """Fill the inputs with a step of this shape."""
        upload(self.place, layout.place)
        inputs = (batch for wave in self.waves for batch in wave)
        for batch, values in zip(inputs, layout.batches, strict=True):
            upload(batch.order, values.order)
            upload(batch.real, values.real)
            upload(batch.sources, values.sources)
            upload(batch.targets, values.targets)
            upload(batch.tails, values.tails)


class _Layer(NamedTuple):
    """What all batches of a layer read: rows of the projections, and the pools as they are by then."""

    number: int
    qkv: int
    decay: int
    beta: int
    conv: int
    matrix: int


def build_recurrent(g: GraphBuilder, states: StateInputs, layer: int, x: int, norm: str | None) -> int:
    """See GraphBuilder.recurrent."""
    lib, ctx, sizes, rows = g.lib, g.context, states.pools.sizes, g.rows_of(x)

    def w(name: str) -> int:
        return g.weights.tensor(f"blk.{layer}.{name}")

    projected = g.norm_linear(x, norm, [f"blk.{layer}.{name}.weight" for name in PROJECTIONS])
    qkv, z, alpha, beta = projected
    decay = lib.mul(ctx, lib.softplus(ctx, g.add(alpha, w("ssm_dt.bias"))), w("ssm_a"))  # its logarithm
    conv, matrix = states.pools.conv[layer], states.pools.matrix[layer]
    outputs = None
    for wave in states.waves:
        begun = _Layer(layer, qkv, decay, lib.sigmoid(ctx, beta), conv, matrix)
        for batch in wave:
            y, conv, matrix = _advance(g, sizes, begun, batch, (conv, matrix))
            outputs = y if outputs is None else lib.concat(ctx, outputs, y, 1)
    assert outputs is not None
    y = lib.reshape_3d(ctx, lib.get_rows(ctx, outputs, states.place), sizes.dim, sizes.value_heads, rows)
    normed = lib.mul(ctx, lib.rms_norm(ctx, y, g.config.norm_eps), w("ssm_norm.weight"))
    gate = lib.reshape_3d(ctx, lib.silu(ctx, z), sizes.dim, sizes.value_heads, rows)
    return lib.reshape_2d(ctx, lib.mul(ctx, normed, gate), sizes.value_width, rows)


def _advance(
    g: GraphBuilder, sizes: DeltaNet, layer: _Layer, batch: _BatchInputs, pools: tuple[int, int]
) -> tuple[int, int, int]:
    """(y [value width, n r], the pools afterwards). States are read as `layer` has them."""
    lib, ctx, n, r = g.lib, g.context, batch.sequences, batch.rows
    channels, kept, heads, dim = sizes.conv_width, sizes.taps - 1, sizes.value_heads, sizes.dim
    rows = lib.reshape_3d(ctx, lib.get_rows(ctx, layer.qkv, batch.order), channels, r, n)
    before = lib.reshape_3d(ctx, lib.get_rows(ctx, layer.conv, batch.sources), channels, kept, n)
    inputs = lib.concat(ctx, before, rows, 1)
    last = lib.get_rows(ctx, lib.reshape_2d(ctx, inputs, channels, (kept + r) * n), batch.tails)
    last = lib.reshape_2d(ctx, last, kept * channels, n)
    conv = _keep(g, pools[0], last, batch.targets)
    turned = lib.cont(ctx, lib.permute(ctx, inputs, 1, 0, 2, 3))
    taps = g.weights.tensor(f"blk.{layer.number}.ssm_conv1d.weight")
    mixed = lib.silu(ctx, lib.ssm_conv(ctx, turned, taps))  # [channels, r, n]
    q, k, v = _heads(g, sizes, mixed, n, r)
    decay, beta = (
        lib.reshape_4d(ctx, lib.mul(ctx, lib.get_rows(ctx, gate, batch.order), batch.real), 1, heads, r, n)
        for gate in (layer.decay, layer.beta)
    )
    state = lib.reshape_4d(ctx, lib.get_rows(ctx, layer.matrix, batch.sources), dim, dim, heads, n)
    both = lib.gated_delta_net(ctx, q, k, v, decay, beta, state, 1)
    width, size = 4 * heads * dim, 4 * sizes.matrix_floats
    y = lib.view_4d(ctx, both, heads * dim, n * r, 1, 1, width, width * n * r, width * n * r, 0)
    after = lib.view_4d(ctx, both, sizes.matrix_floats, n, 1, 1, size, size * n, size * n, width * n * r)
    return lib.cont(ctx, y), conv, _keep(g, pools[1], lib.cont(ctx, after), batch.targets)


def _heads(g: GraphBuilder, sizes: DeltaNet, mixed: int, n: int, r: int) -> list[int]:
    """q and k [dim, key heads, r, n] of length one, v [dim, value heads, r, n]."""
    lib, ctx, dim, row = g.lib, g.context, sizes.dim, 4 * sizes.conv_width
    found: list[int] = []
    at = 0
    for heads in (sizes.key_heads, sizes.key_heads, sizes.value_heads):
        view = lib.view_4d(ctx, mixed, dim, heads, r, n, 4 * dim, row, row * r, at)
        part = lib.cont(ctx, view)
        if len(found) < 2:  # x / sqrt(sum of squares + eps), by the mean of squares
            normed = lib.rms_norm(ctx, part, g.config.norm_eps / dim)
            part = lib.scale(ctx, normed, 1.0 / math.sqrt(dim))
        found.append(part)
        at += 4 * dim * heads
    return found


def _keep(g: GraphBuilder, pool: int, values: int, targets: int) -> int:
    """The pool after `values` were written; reading through it keeps the order."""
    stored = g.lib.set_rows(g.context, pool, values, targets)
    g.lib.build_forward_expand(g.graph, stored)
    return stored


__all__ = ["LAYER_NODES", "NODES", "StateInputs", "StatePools", "build_recurrent"]
