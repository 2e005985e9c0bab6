"""One layer's mixture of experts on inputs of the test's choosing, and the same in numpy."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "engine"))
from driver import Driver
from reference import silu
from reference_experts import mixture

from backends.cpu.layers import NO_LAYOUT
from backends.ggml.graph import GraphBuilder
from backends.ggml.lib import STATUS_SUCCESS, ggml
from backends.ggml.models.mixture import expert_weights
from quant.blocks import dequantize
from quant.gguf import GGUFFile


class ExpertLayer:
    """Layer 0 of a model, on `threads` threads."""

    def __init__(self, path: Path, threads: int = 2):
        self.driver = Driver(path, num_blocks=2, max_tokens=16, threads=threads)
        self.config, self.lib = self.driver.config, ggml()
        self._graphs: dict[int, tuple[GraphBuilder, int, int, int]] = {}  # with their allocators

    def run(self, x: np.ndarray, rows: int | None = None) -> np.ndarray:
        """x float32 [T, n_embd], through a graph of `rows` rows (T if None), to [T, n_embd]."""
        graph, source, result = self.graph(rows or len(x))
        padded = np.zeros((rows or len(x), self.config.n_embd), np.float32)
        padded[: len(x)] = x
        self.lib.backend_tensor_set(source, padded.ctypes.data, 0, padded.nbytes)
        self.compute(graph, len(x))
        self.lib.backend_tensor_get(result, padded.ctypes.data, 0, padded.nbytes)
        return padded[: len(x)]

    def compute(self, graph: int, count: int) -> None:
        """Run a graph that `graph` made on `count` rows."""
        self.driver.stage._layers.kv.header.set_rows(count)
        assert self.lib.backend_graph_compute(self.driver.stage.device.backend, graph) == STATUS_SUCCESS

    def graph(self, rows: int) -> tuple[int, int, int]:
        """(graph, its input, its output), made on first use."""
        if rows not in self._graphs:
            g = self.driver.stage._layers.new_builder(rows, NO_LAYOUT)
            source = g.input_f32(self.config.n_embd, rows)
            result = g.expert_ffn(0, source)
            g.finish([result])
            allocator = self.lib.gallocr_new(self.driver.stage.device.buffer_type)
            assert self.lib.gallocr_alloc_graph(allocator, g.graph)
            self._graphs[rows] = (g, allocator, source, result)
        g, _, source, result = self._graphs[rows]
        return g.graph, source, result

    def chosen(self, x: np.ndarray) -> np.ndarray:
        """Ids of each row's experts [T, used], the most probable one first."""
        router = _decoded(self.driver.gguf, expert_weights(0).router)
        used = self.config.mixture.used
        return np.argsort(-(self._normed(x) @ router.T), axis=1, kind="stable")[:, :used]

    def _normed(self, x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        weight = _decoded(self.driver.gguf, expert_weights(0).norm)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config.norm_eps) * weight

    def exact(self, x: np.ndarray) -> np.ndarray:
        """What `run` should give, in float64 with the decoded weights."""
        w = {name: _decoded(self.driver.gguf, name) for name in expert_weights(0)}
        return x + mixture(self._normed(x), w, "blk.0.", self.config.mixture, silu)

    def close(self) -> None:
        for g, allocator, _, _ in self._graphs.values():
            self.lib.gallocr_free(allocator)
            self.lib.free(g.context)
        self.driver.close()


def _decoded(gguf: GGUFFile, name: str) -> np.ndarray:
    info = gguf.tensors[name]
    return dequantize(info.type, gguf.tensor_data(name), info.shape[::-1]).astype(np.float64)
