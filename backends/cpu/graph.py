"""The graph builder of the CPU device: our own attention, and our own matmul where it has the format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from backends.cpu import argmax, embedding, linear, matmul
from backends.cpu import attention as attend
from backends.cpu import rope_store as store
from backends.cpu.packed import PackedWeights
from backends.cpu.pools import CpuKV
from backends.cpu.step import LOGITS, TOKENS
from backends.ggml.devices import Device
from backends.ggml.graph import GraphBuilder
from backends.ggml.lib import ggml
from backends.ggml.models.config import ModelConfig
from backends.ggml.models.tensors import bias_of, experts_of
from backends.ggml.weights import Weights

if TYPE_CHECKING:
    from backends.cpu.states import CpuStates

# what the quantizer does first, by the activation and whether there is no gate
FUSED_ACTIVATIONS = {
    ("silu", False): linear.SILU,
    ("gelu", False): linear.GELU,
    ("gelu", True): linear.GELU_ALONE,
}


class CpuGraphBuilder(GraphBuilder):
    """A block in ten nodes instead of twenty where all its matrices are packed:

    norm + quantize, q|k|v, rope + store, attend, quantize, output + residual,
    norm + quantize, gate|up, activation + quantize, down + residual
    """

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        weights: Weights,
        rows: int,
        kv: CpuKV,
        packed: PackedWeights,
        states: CpuStates | None,
    ):
        super().__init__(config, device, weights, rows)
        self.kv, self.packed, self.states = kv, packed, states
        self._count_at = kv.header.word_address(TOKENS)  # where the number of real rows stands
        self._parameters: list[np.ndarray] = []  # the graph points into these
        self._scaled: list[np.ndarray] = []  # and these

    def embed(self, ids: int, name: str, scale: float) -> int:
        if name not in self.packed:
            return super().embed(ids, name, scale)
        w, p = self.packed[name], self._new_parameters(embedding.NUM_PARAMS)
        p[embedding.E_COUNT_AT], p[embedding.E_PACKED], p[embedding.E_K] = (
            self._count_at,
            w.data.ctypes.data,
            w.k,
        )
        p[embedding.E_FUNCTION] = embedding.compiled_lookup(w.type_id).address
        p[embedding.E_SCRATCH] = self.kv.matmul_scratch.ctypes.data
        x = self.custom(w.k, self.rows, (ids,), embedding.embed_operator.address, p)
        return x if scale == 1.0 else self.lib.scale(self.context, x, scale)

    def select(self, x: int, rows: int) -> int:
        selected = super().select(x, rows)
        self._count_at = self.kv.header.word_address(LOGITS)  # all that follows has these rows
        return selected

    def linear(self, x: int, weight: str, residual: int | None = None) -> int:
        if weight not in self.packed:
            return super().linear(x, weight, residual)
        return self._multiply(self._quantize(x, linear.PLAIN, (weight,)), x, (weight,), residual)

    def norm_linear(self, x: int, norm: str | None, weights: Sequence[str], apart: bool = False) -> list[int]:
        """The projections side by side in one tensor if all are packed, else one tensor each."""
        if not all(w in self.packed for w in weights):
            return super().norm_linear(x, norm, weights, apart)
        mode = linear.PLAIN if norm is None else linear.NORM
        if norm is not None and self.config.family.norm != "rms":
            x, mode, norm = self.norm(x, norm), linear.PLAIN, None
        activations = self._quantize(x, mode, weights, norm)
        if apart:
            return [self._multiply(activations, x, (w,), None, weights) for w in weights]
        return [self._multiply(activations, x, weights, None)]

    def feed_forward(
        self, x: int, norm: str | None, inputs: Sequence[str], down: str, residual: int | None
    ) -> int:
        family = self.config.family
        mode = FUSED_ACTIVATIONS.get((family.activation, family.ffn == "plain"))
        if mode is None or down not in self.packed:
            return super().feed_forward(x, norm, inputs, down, residual)
        products = self.norm_linear(x, norm, inputs)
        if len(products) > 1:
            return self.linear(self.activate(*products), down, residual)
        return self._multiply(self._quantize(products[0], mode, (down,)), products[0], (down,), residual)

    def mixture(self, layer: int, x: int, residual: bool = True) -> int:
        w = experts_of(self.config, layer)
        if not all(name in self.packed for name in w[1:]):
            return super().mixture(layer, x, residual)
        from backends.cpu import expert_graph  # compiled only for models that have experts

        return expert_graph.build(self, layer, x, w, residual)

    def attention(self, layer: int, projections: Sequence[int]) -> int:
        c, heads = self.config, self.config.heads_of(layer)
        ready = self.custom(
            c.n_head * heads.dim_k,
            self.rows_of(projections[0]),
            projections,
            store.rope_store_operator.address,
            self.kv.store_parameters(layer, fused=len(projections) == 1),
        )
        return self.custom(
            c.n_head * heads.dim_v,
            self.rows_of(ready),
            (ready,),
            attend.attention_operator.address,
            self.kv.attention_parameters(layer),
        )

    def gated_attention(self, layer: int, projections: Sequence[int]) -> int:
        from backends.cpu.recurrent_graph import build_gated_attention  # compiled only where it is used

        return build_gated_attention(self, layer, projections)

    def recurrent(self, layer: int, x: int, norm: str | None) -> int:
        from backends.cpu.recurrent_graph import build_recurrent  # compiled only where it is used

        return build_recurrent(self, layer, x, norm)

    def argmax(self, logits: int) -> int | None:
        p = self._new_parameters(argmax.NUM_PARAMS)
        p[0] = self._count_at
        return self.custom(1, self.rows_of(logits), (logits,), argmax.argmax_operator.address, p)

    def _quantize(
        self, x: int, mode: int, weights: Sequence[str], norm: str | None = None, scale: float = 1.0
    ) -> int:
        """A node with the activations of x in every kind that the weights read. `scale`: of the norm."""
        k = self.packed[weights[0]].k
        kinds = sorted({self.packed[w].kind for w in weights})
        p = self._new_parameters(linear.NUM_QUANTIZE)
        p[linear.Q_COUNT_AT], p[linear.Q_MODE], p[linear.Q_K] = self._count_at, mode, k
        p[linear.Q_KINDS] = linear.kind_bits(kinds)
        p[linear.Q_EPS] = int(np.float32(self.config.norm_eps).view(np.int32))
        if norm is not None:
            p[linear.Q_WEIGHT] = ggml().get_data(self.weights.tensor(norm))
            if scale != 1.0:
                self._scaled.append(self.weights.values(norm) * np.float32(scale))
                p[linear.Q_WEIGHT] = self._scaled[-1].ctypes.data
        token_bytes = sum(matmul.activation_nbytes(kind, 1, k) for kind in kinds)
        return self.custom(-(-token_bytes // 4), self.rows_of(x), (x,), linear.quantize_operator.address, p)

    def _multiply(
        self,
        activations: int,
        like: int,
        weights: Sequence[str],
        residual: int | None,
        shared: Sequence[str] = (),
    ) -> int:
        """A node that multiplies quantized rows by packed weights, outputs side by side.

        `shared`: for which weights the rows were quantized, if for more than these.
        """
        matrices = [self.packed[w] for w in weights]
        width = sum(w.m for w in matrices)
        p = self._new_parameters(linear.M_FIRST + linear.MATRIX_WORDS * len(matrices))
        p[linear.M_COUNT_AT], p[linear.M_MATRICES], p[linear.M_WIDTH] = self._count_at, len(matrices), width
        p[linear.M_SCRATCH], p[linear.M_RESIDUAL] = (
            self.kv.matmul_scratch.ctypes.data,
            int(residual is not None),
        )
        kinds = sorted({self.packed[w].kind for w in shared or weights})
        column = 0
        for i, w in enumerate(matrices):
            words = p[linear.M_FIRST + linear.MATRIX_WORDS * i :]
            words[linear.W_FUNCTION] = matmul.compiled_matmul(w.type_id).address
            words[linear.W_PACKED], words[linear.W_ROWS], words[linear.W_K] = w.data.ctypes.data, w.m, w.k
            words[linear.W_OFFSET] = sum(
                matmul.activation_nbytes(kind, 1, w.k) for kind in kinds if kind < w.kind
            )
            words[linear.W_COLUMN] = column
            if bias_of(weights[i]) in self.weights:
                words[linear.W_BIAS] = ggml().get_data(self.weights.tensor(bias_of(weights[i])))
            column += w.m
        sources = (activations,) if residual is None else (activations, residual)
        return self.custom(width, self.rows_of(like), sources, linear.multiply_operator.address, p)

    def _new_parameters(self, words: int) -> np.ndarray:
        self._parameters.append(np.zeros(words, np.int64))
        return self._parameters[-1]
