"""Random weights in ggml's block formats, and one matrix multiplied by our kernels and by ggml's."""

from __future__ import annotations

import threading

import numpy as np

from backends.cpu import matmul
from backends.cpu.matmul.layout import BF16, F16, F32, MXFP4, Q4_1, Q4_K, Q5_1, Q5_K, Q6_K
from backends.ggml import lib as ggml_lib
from backends.ggml.devices import open_device
from quant.types import GGML_TYPES


def aligned(nbytes: int, alignment: int = 64) -> np.ndarray:
    """uint8 [nbytes] whose address is a multiple of `alignment`."""
    memory = np.zeros(nbytes + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + nbytes]


def random_rows(rng: np.random.Generator, type_id: int, m: int, k: int, scale: float = 0.01) -> np.ndarray:
    """Blocks of random codes and scales of normal size: uint8 [m, row bytes]."""
    fmt = GGML_TYPES[type_id]
    if type_id in (F32, F16, BF16):
        values = (rng.standard_normal((m, k)) * scale).astype(np.float16 if type_id == F16 else np.float32)
        raw = values.view(np.uint8).reshape(m, k, -1)
        return np.ascontiguousarray(raw[..., -fmt.nbytes :]).reshape(m, -1)
    raw = rng.integers(0, 256, (m, k // fmt.elements, fmt.nbytes), dtype=np.uint8)

    def put_half(offset: int, size: float) -> None:
        values = rng.standard_normal((m, k // fmt.elements, 1)) * size
        raw[..., offset : offset + 2] = values.astype(np.float16).view(np.uint8)

    if type_id == MXFP4:  # an exponent; codes are up to 12
        raw[..., 0] = int(np.log2(scale)) + 128 + rng.integers(-8, 3, raw.shape[:2])
    elif type_id == Q6_K:
        put_half(208, scale / 32)
    else:
        put_half(0, scale)
    if type_id in (Q4_1, Q5_1, Q4_K, Q5_K):
        put_half(2, scale)
    return raw.reshape(m, -1)


class OurMatmul:
    """A packed matrix. `multiply(x)` is quantize + matmul; with `threads` > 1 on as many Python threads."""

    def __init__(self, type_id: int, raw: np.ndarray, m: int, k: int) -> None:
        self.type_id, self.m, self.k = type_id, m, k
        self.packed = aligned(matmul.packed_nbytes(type_id, m, k))
        matmul.pack(type_id, raw.ctypes.data, m, k, self.packed.ctypes.data)

    def multiply(self, x: np.ndarray, threads: int = 1) -> np.ndarray:
        """x float32 [n, k] to y float32 [n, m]."""
        n, k, m, kind = len(x), self.k, self.m, matmul.activation_kind(self.type_id)
        activations = aligned(matmul.activation_nbytes(kind, n, k))
        scratch = aligned(matmul.SCRATCH_BYTES * threads)
        y = np.full((n, m), np.nan, np.float32)
        multiply = matmul.compiled_matmul(self.type_id).ctypes

        def quantize(i: int) -> None:
            rows, out = x.ctypes.data, activations.ctypes.data
            matmul.quantize_activations(kind, rows, x.strides[0], n, k, out, i, threads)

        def compute(i: int) -> None:
            multiply(
                self.packed.ctypes.data,
                m,
                k,
                activations.ctypes.data,
                n,
                y.ctypes.data,
                y.strides[0],
                scratch.ctypes.data,
                i,
                threads,
            )

        for work in (quantize, compute):
            workers = [threading.Thread(target=work, args=(i,)) for i in range(1, threads)]
            for worker in workers:
                worker.start()
            work(0)
            for worker in workers:
                worker.join()
        return y


class GgmlMatmul:
    """The same product as a ggml graph of `repeats` mul_mat nodes over `copies` of the matrix."""

    def __init__(
        self,
        type_id: int,
        raw: np.ndarray,
        m: int,
        k: int,
        n: int,
        threads: int = 1,
        copies: int = 1,
        repeats: int = 1,
        buffer_type: int | None = None,
    ) -> None:
        """`buffer_type`: where the weights lie, if not in the device's ordinary buffers."""
        self.lib, self.m, self.n = ggml_lib.ggml(), m, n
        self.device = open_device("CPU", threads)
        nodes = 2 * repeats + 16
        weights_context = self.lib.context(copies)
        self.context = self.lib.context(nodes, nodes)
        self.contexts = [weights_context, self.context]
        weights = [self.lib.new_tensor_4d(weights_context, type_id, k, m, 1, 1) for _ in range(copies)]
        self.x = self.lib.new_tensor_4d(self.context, ggml_lib.TYPE_F32, k, n, 1, 1)
        ordinary = self.device.buffer_type
        weights_buffer = self.lib.backend_alloc_ctx_tensors_from_buft(
            weights_context, buffer_type or ordinary
        )
        self.lib.backend_buffer_set_usage(weights_buffer, ggml_lib.BUFFER_USAGE_WEIGHTS)
        x_buffer = self.lib.backend_alloc_ctx_tensors_from_buft(self.context, ordinary)
        buffers = [weights_buffer, x_buffer]
        for weight in weights:
            self.lib.backend_tensor_set(weight, raw.ctypes.data, 0, raw.nbytes)
        self.products = [self.lib.mul_mat(self.context, weights[i % copies], self.x) for i in range(repeats)]
        buffers.append(self.lib.backend_alloc_ctx_tensors_from_buft(self.context, ordinary))
        self.graph = self.lib.new_graph_custom(self.context, nodes, False)
        for product in self.products:
            self.lib.build_forward_expand(self.graph, product)
        self.buffers = buffers

    def set(self, x: np.ndarray) -> None:
        x = np.ascontiguousarray(x, np.float32)
        self.lib.backend_tensor_set(self.x, x.ctypes.data, 0, x.nbytes)

    def run(self) -> None:
        status = self.lib.backend_graph_compute(self.device.backend, self.graph)
        assert status == ggml_lib.STATUS_SUCCESS

    def multiply(self, x: np.ndarray) -> np.ndarray:
        """x float32 [n, k] to y float32 [n, m]."""
        self.set(x)
        self.run()
        y = np.empty((self.n, self.m), np.float32)
        self.lib.backend_tensor_get(self.products[-1], y.ctypes.data, 0, y.nbytes)
        return y

    def close(self) -> None:
        for buffer in self.buffers:
            self.lib.backend_buffer_free(buffer)
        for context in self.contexts:
            self.lib.free(context)
        self.device.close()


def ggml_dequantize(type_id: int, raw: np.ndarray, m: int, k: int) -> np.ndarray:
    """ggml's own float32 of the rows, by get_rows."""
    lib, device = ggml_lib.ggml(), open_device("CPU", 1)
    context = lib.context(8, 8)
    weights = lib.new_tensor_4d(context, type_id, k, m, 1, 1)
    rows = lib.new_tensor_4d(context, ggml_lib.TYPE_I32, m, 1, 1, 1)
    result = lib.get_rows(context, weights, rows)
    buffer = lib.backend_alloc_ctx_tensors_from_buft(context, device.buffer_type)
    index = np.arange(m, dtype=np.int32)
    lib.backend_tensor_set(weights, raw.ctypes.data, 0, raw.nbytes)
    lib.backend_tensor_set(rows, index.ctypes.data, 0, index.nbytes)
    graph = lib.new_graph_custom(context, 8, False)
    lib.build_forward_expand(graph, result)
    assert lib.backend_graph_compute(device.backend, graph) == ggml_lib.STATUS_SUCCESS
    out = np.empty((m, k), np.float32)
    lib.backend_tensor_get(result, out.ctypes.data, 0, out.nbytes)
    lib.backend_buffer_free(buffer)
    lib.free(context)
    device.close()
    return out


__all__ = ["GgmlMatmul", "OurMatmul", "aligned", "ggml_dequantize", "random_rows"]
