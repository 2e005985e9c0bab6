"""The weights that our own matmul reads: repacked copies, which take the place of the file's pages."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from backends.cpu import matmul
from backends.cpu.matmul.choice import kernel_for
from backends.cpu.matmul.layout import PANEL_ROWS
from backends.cpu.step import aligned_empty
from backends.ggml.models.experts import expert_group
from backends.ggml.models.mixture import FUSED_EXPERTS
from backends.ggml.weights import Progress
from quant.gguf import GGUFFile, TensorInfo

SHARE_BYTES = 1 << 20  # of a tensor in the file, that a thread reads and packs at a time, within its caches


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One matrix [m][k] in the layout of matmul/layout.py, or one for each expert, one after the other."""

    type_id: int
    m: int
    k: int
    data: np.ndarray

    @property
    def kind(self) -> int:
        return matmul.activation_kind(self.type_id)

    @property
    def expert_nbytes(self) -> int:
        return matmul.packed_nbytes(self.type_id, self.m, self.k)


def packable(gguf: GGUFFile, name: str) -> bool:
    """Whether our kernels multiply by this tensor on this CPU, no slower than ggml's.

    Of a layer with experts, the router and all experts go the same way.
    """
    group = expert_group(name, gguf.tensors)
    return all(_supported(gguf, n) for n in group) if group else _supported(gguf, name)


def _supported(gguf: GGUFFile, name: str) -> bool:
    info = gguf.tensors[name]
    k, m = info.shape[:2]
    if not matmul.supported(info.type, m, k):
        return False
    if len(info.shape) == 3:  # any format: a tenth slower at worst (BF16, one token); tests/bench/experts.py
        return m % (2 * PANEL_ROWS if FUSED_EXPERTS in name else PANEL_ROWS) == 0
    return kernel_for(info.type) == "ours"


class PackedWeights:
    """Repacks the named tensors, which must all be `packable`, with `threads` threads.

    All lie in one piece of memory, which the system can back with huge pages: with a piece for each, a
    quarter of the time went into page faults. The file is read, not mapped: mapped pages count as this
    process's memory, and come back when a neighbour is touched.
    """

    def __init__(self, gguf: GGUFFile, names: Iterable[str], threads: int, progress: Progress | None = None):
        infos = [gguf.tensors[name] for name in names]
        sizes = [matmul.packed_nbytes(i.type, _rows(i), i.shape[0]) for i in infos]
        self.nbytes = sum(sizes)
        memory, end = aligned_empty(self.nbytes), 0  # sizes are whole cache lines
        self._weights: dict[str, PackedWeight] = {}
        for info, size in zip(infos, sizes, strict=True):
            data, end = memory[end : end + size], end + size
            self._weights[info.name] = PackedWeight(info.type, info.shape[1], info.shape[0], data)
        self._pack_all(gguf, infos, threads, progress)

    def _pack_all(
        self, gguf: GGUFFile, infos: list[TensorInfo], threads: int, progress: Progress | None
    ) -> None:
        size = max((_share_rows(i) * (i.nbytes // _rows(i)) for i in infos), default=0)
        buffers: SimpleQueue[np.ndarray] = SimpleQueue()  # that no thread is using
        for _ in range(threads if size else 0):
            # not from malloc, which might keep the memory when it is freed
            buffers.put(np.frombuffer(mmap.mmap(-1, size), np.uint8))
        with ThreadPoolExecutor(threads) as pool:
            shares = [
                [
                    pool.submit(self._pack_rows, gguf, info, first, buffers)
                    for first in range(0, _rows(info), _share_rows(info))
                ]
                for info in infos
            ]
            try:
                for info, parts in zip(infos, shares, strict=True):
                    for part in parts:
                        part.result()
                    if progress:
                        progress(info.nbytes)
            except BaseException:  # Ctrl-C, too, does not wait for the rest
                pool.shutdown(cancel_futures=True)
                raise

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def __getitem__(self, name: str) -> PackedWeight:
        return self._weights[name]

    def _pack_rows(
        self, gguf: GGUFFile, info: TensorInfo, first: int, buffers: SimpleQueue[np.ndarray]
    ) -> None:
        """Read and pack a share of a tensor, from row `first` on."""
        w = self._weights[info.name]
        rows, row_bytes = min(_share_rows(info), _rows(info) - first), info.nbytes // _rows(info)
        buffer = buffers.get()
        try:
            gguf.read_into(info.name, first * row_bytes, buffer[: rows * row_bytes])
            target = w.data.ctypes.data + matmul.packed_nbytes(w.type_id, first, w.k)
            matmul.pack(w.type_id, buffer.ctypes.data, rows, w.k, target)
        finally:
            buffers.put(buffer)


def _rows(info: TensorInfo) -> int:
    """Rows of a matrix, or of all experts together, which have whole panels."""
    return math.prod(info.shape[1:])


def _share_rows(info: TensorInfo) -> int:
    """Rows of a share: whole panels, about SHARE_BYTES in the file."""
    return max(1, SHARE_BYTES * _rows(info) // info.nbytes // PANEL_ROWS) * PANEL_ROWS
