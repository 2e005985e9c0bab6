"""One layer's mixture of experts on inputs of the test's choosing, and the same in numpy."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "engine"))
from driver import Driver
from reference import _silu, mixture

from backends.cpu.step import TOKENS
from backends.ggml.lib import STATUS_SUCCESS, ggml
from backends.ggml.models.experts import expert_weights
from quant.blocks import dequantize
from quant.gguf import GGUFFile


class ExpertLayer:
    """Layer 0 of a model, on `threads` threads."""

    def __init__(self, path: Path, threads: int = 2):
        self.driver = Driver(path, num_blocks=2, max_tokens=16, threads=threads)
        self.config = self.driver.config

    def run(self, x: np.ndarray, rows: int | None = None) -> np.ndarray:
        """x float32 [T, n_embd], through a graph of `rows` rows (T if None), to [T, n_embd]."""
        stage, lib = self.driver.stage, ggml()
        g = stage._new_builder(rows or len(x))
        source = g.input_f32(self.config.n_embd, g.rows)
        result = g.expert_ffn(0, source)
        g.finish([result])
        allocator = lib.gallocr_new(stage.device.buffer_type)
        assert lib.gallocr_alloc_graph(allocator, g.graph)
        header = stage._layers.kv.header
        header.words[TOKENS] = len(x)
        header._counters[:] = 0
        padded = np.zeros((g.rows, self.config.n_embd), np.float32)
        padded[: len(x)] = x
        lib.backend_tensor_set(source, padded.ctypes.data, 0, padded.nbytes)
        assert lib.backend_graph_compute(stage.device.backend, g.graph) == STATUS_SUCCESS
        out = np.empty_like(padded)
        lib.backend_tensor_get(result, out.ctypes.data, 0, out.nbytes)
        lib.gallocr_free(allocator)
        lib.free(g.context)
        return out[: len(x)]

    def exact(self, x: np.ndarray) -> np.ndarray:
        """What `run` should give, in float64 with the decoded weights."""
        w = {name: _decoded(self.driver.gguf, name) for name in expert_weights(0)}
        x = x.astype(np.float64)
        h = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config.norm_eps) * w[expert_weights(0).norm]
        return x + mixture(h, w, "blk.0.", self.config.n_expert_used, _silu)

    def close(self) -> None:
        self.driver.close()


def _decoded(gguf: GGUFFile, name: str) -> np.ndarray:
    info = gguf.tensors[name]
    return dequantize(info.type, gguf.tensor_data(name), info.shape[::-1]).astype(np.float64)
