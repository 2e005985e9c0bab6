"""The weights that our own matmul reads: repacked copies, which take the place of the file's pages."""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from backends.cpu import matmul
from backends.cpu.matmul.choice import kernel_for
from backends.cpu.matmul.layout import PANEL_ROWS
from backends.cpu.step import aligned_empty
from backends.ggml.models.experts import expert_group
from backends.ggml.weights import Progress
from quant.gguf import GGUFFile


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
    group = expert_group(name)
    return all(_supported(gguf, n) for n in group) if group else _supported(gguf, name)


def _supported(gguf: GGUFFile, name: str) -> bool:
    info = gguf.tensors[name]
    k, m = info.shape[:2]
    if not matmul.supported(info.type, m, k):
        return False
    if len(info.shape) == 3:  # any format: a tenth slower at worst (BF16, one token); tests/bench/experts.py
        return m % PANEL_ROWS == 0
    return kernel_for(info.type) == "ours"


class PackedWeights:
    """Repacks the named tensors, which must all be `packable`, with `threads` threads."""

    def __init__(self, gguf: GGUFFile, names: Iterable[str], threads: int, progress: Progress | None = None):
        self._weights: dict[str, PackedWeight] = {}
        with ThreadPoolExecutor(threads) as pool:
            for name in names:
                self._weights[name] = self._pack(gguf, name, threads, pool)
                if progress:
                    progress(gguf.tensors[name].nbytes)
        self.nbytes = sum(w.data.nbytes for w in self._weights.values())

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def __getitem__(self, name: str) -> PackedWeight:
        return self._weights[name]

    @staticmethod
    def _pack(gguf: GGUFFile, name: str, threads: int, pool: ThreadPoolExecutor) -> PackedWeight:
        info = gguf.tensors[name]
        k, m, *experts = info.shape
        rows = m * math.prod(experts)  # experts have whole panels
        source = gguf.tensor_data(name)
        data = aligned_empty(matmul.packed_nbytes(info.type, rows, k))
        shares = [
            pool.submit(matmul.pack, info.type, source.ctypes.data, rows, k, data.ctypes.data, ith, threads)
            for ith in range(threads)
        ]
        for share in shares:
            share.result()
        gguf.release_pages(name)
        return PackedWeight(info.type, m, k, data)
