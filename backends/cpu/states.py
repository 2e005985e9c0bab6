"""States of the recurrent layers on a CPU device, and the parameters of the operators that use them."""

from __future__ import annotations

import ctypes as C
import math
from collections.abc import Sequence

import numpy as np

from backends.base import BatchLike
from backends.cpu import delta_net as net
from backends.cpu.step import aligned_empty
from backends.ggml.devices import Device
from backends.ggml.lib import TYPE_F32, ggml
from backends.ggml.models.delta_net import PROJECTIONS, DeltaNet
from backends.ggml.recurrent import state_segments
from backends.ggml.weights import DeviceTensors, Weights


class CpuStates:
    """`num_states` slots for each of `layers`, as delta_net.py draws them; slot 0 is zeros for ever.

    Memory is asked for at once but touched only as slots are first written.
    """

    def __init__(
        self,
        sizes: DeltaNet,
        norm_eps: float,
        device: Device,
        weights: Weights,
        layers: Sequence[int],
        num_states: int,
    ):
        self.sizes, self._weights, self._eps = sizes, weights, norm_eps
        shapes = [
            (TYPE_F32, floats, max(1, num_states))
            for _ in layers
            for floats in (sizes.conv_floats, sizes.matrix_floats)
        ]
        self._pools = DeviceTensors(device, shapes)
        addresses = [ggml().get_data(handle) for handle in self._pools.handles]
        for address, (_, floats, _) in zip(addresses, shapes, strict=True):
            C.memset(address, 0, 4 * floats)
        self._places = dict(zip(layers, zip(addresses[::2], addresses[1::2], strict=True), strict=True))
        self._taps = {layer: self._taps_of(layer) for layer in layers}
        self._scratch = aligned_empty(device.threads * 64 * sizes.dim)
        self._step = np.zeros(3, np.int64)
        self._alive: list[np.ndarray] = []
        self._parameters: list[np.ndarray] = []  # graphs point into these

    @property
    def nbytes(self) -> int:
        return self._pools.nbytes

    def set(self, batch: BatchLike) -> None:
        """Point the operators at a step."""
        segments = state_segments(batch)
        self._alive = [segments]
        self._step[net.TOKENS] = len(batch.positions)
        self._step[net.NUM_SEGMENTS], self._step[net.SEGMENTS] = len(segments), segments.ctypes.data

    def parameters(self, layer: int, widths: Sequence[Sequence[int]]) -> np.ndarray:
        """int64 words for the operators of a layer; they live as long as the states.

        `widths[s]`: how many values of each projection the rows of source s hold side by side.
        """
        p, sizes = np.zeros(net.NUM_PARAMS, np.int64), self.sizes
        p[net.P_STEP], p[net.P_DIM], p[net.P_TAPS] = self._step.ctypes.data, sizes.dim, sizes.taps
        p[net.P_KEY_HEADS], p[net.P_VALUE_HEADS] = sizes.key_heads, sizes.value_heads
        p[net.P_EPS], p[net.P_ONE] = _float_bits(self._eps), _float_bits(1.0)
        p[net.P_QUERY_SCALE] = _float_bits(1.0 / math.sqrt(sizes.dim))
        p[net.P_CONV_POOL], p[net.P_MATRIX_POOL] = self._places[layer]
        p[net.P_CONV_WEIGHT], p[net.P_SCRATCH] = self._taps[layer].ctypes.data, self._scratch.ctypes.data
        for word, name in ((net.P_DT, "ssm_dt.bias"), (net.P_A, "ssm_a"), (net.P_NORM, "ssm_norm.weight")):
            p[word] = ggml().get_data(self._weights.tensor(f"blk.{layer}.{name}"))
        part = net.P_PARTS
        for source, columns in enumerate(widths):
            at = 0
            for width in columns:
                p[part : part + net.PART_WORDS] = source, 4 * at, 4 * sum(columns)
                part, at = part + net.PART_WORDS, at + width
        assert part == net.P_PARTS + net.PART_WORDS * len(PROJECTIONS)
        self._parameters.append(p)
        return p

    def _taps_of(self, layer: int) -> np.ndarray:
        """float32 [taps, channels]: the convolution's weights, turned for vectors of channels."""
        tensor = self._weights.tensor(f"blk.{layer}.ssm_conv1d.weight")
        rows = np.empty((self.sizes.conv_width, self.sizes.taps), np.float32)
        ggml().backend_tensor_get(tensor, rows.ctypes.data, 0, rows.nbytes)
        turned = aligned_empty(rows.nbytes).view(np.float32).reshape(rows.shape[::-1])
        turned[:] = rows.T
        return turned

    def close(self) -> None:
        self._pools.close()


def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))
