"""What goes into each matrix of a block: the stage of `hetero imatrix`. Serving has none of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from backends.base import BatchLike
from backends.cpu.graph import CpuGraphBuilder
from backends.cpu.layers import CpuLayers
from backends.ggml.attention_layout import Layout
from backends.ggml.graph import GraphBuilder
from backends.ggml.lib import shape_of
from backends.ggml.models.experts import expert_group
from backends.ggml.stage import GgmlStage
from quant.gguf import GGUFFile

BLOCKS = "blk."  # the output head and the embeddings are left out, as upstream does


class ObservingBuilder(CpuGraphBuilder):
    """Norms and activation functions as nodes of their own, so that every matrix's input is a tensor.

    The inputs keep their memory to the end of the step. `inputs` maps them to the matrices they enter,
    `routed` those of experts, with the experts' ids, to the matrices.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.inputs: dict[int, list[str]] = {}
        self.routed: dict[tuple[int, int], list[str]] = {}
        self._ids: dict[int, int] = {}  # copies of what experts are named by

    def linear(self, x: int, weight: str, residual: int | None = None) -> int:
        if weight.startswith(BLOCKS):
            self.inputs.setdefault(x, []).append(weight)
            self.lib.set_output(x)
        return super().linear(x, weight, residual)

    def expert_linear(self, x: int, weight: str, ids: int) -> int:
        if ids not in self._ids:
            self._ids[ids] = self.lib.cont(self.context, ids)
            self.finish([self._ids[ids]])
        self.routed.setdefault((x, self._ids[ids]), []).append(weight)
        self.lib.set_output(x)  # of views: what they are of enters the router, and is kept for that
        return super().expert_linear(x, weight, ids)

    def norm_linear(self, x: int, norm: str | None, weights: Sequence[str], apart: bool = False) -> list[int]:
        return GraphBuilder.norm_linear(self, x, norm, weights, apart)

    def feed_forward(
        self, x: int, norm: str | None, inputs: Sequence[str], down: str, residual: int | None
    ) -> int:
        return GraphBuilder.feed_forward(self, x, norm, inputs, down, residual)


class ObservedLayers(CpuLayers):
    """Experts through ggml's matmul, since what enters ours is arranged and quantized."""

    def _is_ours(self, gguf: GGUFFile, name: str) -> bool:
        return not expert_group(name) and super()._is_ours(gguf, name)


class ObservingStage(GgmlStage):
    """A stage that sums the squares of all inputs of its layers' matrices over the steps it runs.

    `sums[weight]` is float64 [n], n the weight's row length, and `tokens` the number of summed inputs; of
    experts float64 [experts, n], and `counts[weight]` int64 [experts] in place of `tokens`. In the last layer
    only rows whose logits are wanted get that far: want none, and all rows do.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.sums: dict[str, np.ndarray] = {}
        self.counts: dict[str, np.ndarray] = {}
        self.tokens = 0
        self._count = 0  # of the prepared step

    def prepare(self, batch: BatchLike, hidden: np.ndarray | None) -> None:
        assert not len(batch.logits_rows), "the last layer's matrices would miss rows"
        super().prepare(batch, hidden)
        self._count = len(batch.positions)

    def compute(self) -> np.ndarray:
        assert self._prepared is not None, "no step was prepared"
        graph = self._prepared[0]
        result = super().compute()
        assert graph is not None and isinstance(graph.builder, ObservingBuilder)
        builder = graph.builder
        for tensor, weights in builder.inputs.items():
            values = np.empty(shape_of(tensor)[1::-1], np.float32)
            self._get(tensor, values)
            squares = np.square(values[: self._count], dtype=np.float64).sum(axis=0)
            for weight in weights:
                self.sums[weight] = self.sums.get(weight, 0.0) + squares
        for (tensor, ids), weights in builder.routed.items():
            self._add_routed(tensor, ids, weights)
        self.tokens += self._count
        return result

    def _add_routed(self, tensor: int, ids: int, weights: list[str]) -> None:
        assert self.config.mixture is not None
        values, chosen = (
            np.empty(shape_of(tensor)[2::-1], np.float32),
            np.empty(shape_of(ids)[1::-1], np.int32),
        )
        self._get(tensor, values)
        self._get(ids, chosen)
        chosen = chosen[: self._count]
        squares = np.square(values[: self._count], dtype=np.float64)
        rows = np.broadcast_to(squares, (*chosen.shape, squares.shape[-1]))
        sums = np.zeros((self.config.mixture.count, squares.shape[-1]))
        for expert in np.unique(chosen):
            sums[expert] = rows[chosen == expert].sum(axis=0)
        counts = np.bincount(chosen.reshape(-1), minlength=len(sums))
        for weight in weights:
            self.sums[weight] = self.sums.get(weight, 0.0) + sums
            self.counts[weight] = self.counts.get(weight, 0) + counts

    def check_invariants(self) -> None:
        assert all(c.sum() % self.tokens == 0 for c in self.counts.values())
        assert all(np.isfinite(s).all() and (s >= 0).all() for s in self.sums.values())

    def _kind(self) -> type[CpuLayers]:
        return ObservedLayers

    def _new_builder(self, rows: int, layout: Layout) -> GraphBuilder:
        assert isinstance(self._layers, CpuLayers)
        return self._layers.new_builder(rows, layout, ObservingBuilder)
