"""One matrix multiplied again and again, for measuring: our two operators as nodes of a ggml graph."""

from __future__ import annotations

import ctypes as C
import statistics
import time
from collections.abc import Callable

import numpy as np

from backends.cpu import linear, matmul
from backends.cpu.step import aligned_empty
from backends.ggml.devices import open_device
from backends.ggml.lib import STATUS_SUCCESS, TYPE_F32, P, ggml

ORDINARY_BYTE = 0x2C  # as codes, and as halves 0x2C2C = 0.07: no infinity slows down or falsifies a product


class RepeatedProduct:
    """`run()` quantizes the activations and multiplies by the matrix, `repeats` times, on `threads` threads.

    The packed matrix lies in memory `copies` times, which take turns: with more of them than the caches hold,
    weights come from memory. Threads meet after each node, as they do between a model's layers.
    """

    def __init__(
        self, type_id: int, m: int, k: int, n: int, threads: int = 1, copies: int = 1, repeats: int = 1
    ):
        """[m][k] weights of a ggml type times n tokens. All values are ordinary, and alike."""
        self._lib = lib = ggml()
        self._device = open_device("CPU", threads)
        kind, step = matmul.activation_kind(type_id), matmul.packed_nbytes(type_id, m, k)
        self.weights = aligned_empty(copies * step)
        self.weights[:] = ORDINARY_BYTE
        self._scratch = aligned_empty(matmul.SCRATCH_BYTES * threads)
        self._count = np.array([n], np.int64)
        nodes = 2 * repeats + 1
        self._context = lib.context(nodes, nodes)
        source = lib.new_tensor_4d(self._context, TYPE_F32, k, n, 1, 1)
        quantize = self._words(linear.NUM_QUANTIZE)
        quantize[linear.Q_MODE], quantize[linear.Q_K] = linear.PLAIN, k
        quantize[linear.Q_KINDS] = 1 << kind
        self._keep = [quantize]  # the graph points into these
        self._graph = lib.new_graph_custom(self._context, nodes, False)
        words = -(-matmul.activation_nbytes(kind, 1, k) // 4)
        products = []
        for i in range(repeats):
            activations = self._custom(words, n, source, linear.quantize_operator.address, quantize)
            p = self._words(linear.M_FIRST + linear.MATRIX_WORDS)
            p[linear.M_MATRICES], p[linear.M_WIDTH] = 1, m
            p[linear.M_SCRATCH] = self._scratch.ctypes.data
            matrix = p[linear.M_FIRST :]
            matrix[linear.W_FUNCTION] = matmul.compiled_matmul(type_id).address
            matrix[linear.W_PACKED] = self.weights.ctypes.data + i % copies * step
            matrix[linear.W_ROWS], matrix[linear.W_K] = m, k
            self._keep.append(p)
            products.append(self._custom(m, n, activations, linear.multiply_operator.address, p))
            lib.build_forward_expand(self._graph, products[-1])
        self.last = products[-1]  # [m, n]
        lib.set_input(source)
        lib.set_output(self.last)
        self._allocator = lib.gallocr_new(self._device.buffer_type)
        lib.gallocr_alloc_graph(self._allocator, self._graph)
        x = np.random.default_rng(0).standard_normal((n, k)).astype(np.float32)
        lib.backend_tensor_set(source, x.ctypes.data, 0, x.nbytes)

    def run(self) -> None:
        status = self._lib.backend_graph_compute(self._device.backend, self._graph)
        assert status == STATUS_SUCCESS

    def close(self) -> None:
        self._lib.gallocr_free(self._allocator)
        self._lib.free(self._context)
        self._device.close()

    def _words(self, count: int) -> np.ndarray:
        """An operator's parameters; word 0 of both operators says where the number of rows stands."""
        assert linear.Q_COUNT_AT == linear.M_COUNT_AT == 0
        words = np.zeros(count, np.int64)
        words[0] = self._count.ctypes.data
        return words

    def _custom(self, width: int, rows: int, source: int, function: int, words: np.ndarray) -> int:
        array, address = (P * 1)(source), C.c_void_p(function)
        return self._lib.custom_4d(
            self._context, TYPE_F32, width, rows, 1, 1, array, 1, address, -1, words.ctypes.data
        )


def median_seconds(run: Callable[[], None], rounds: int) -> float:
    """Median time of `run` over `rounds`, after one that does not count."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


__all__ = ["RepeatedProduct", "median_seconds"]
