"""Importance matrices: how strongly each column of a weight matrix is used, measured on some text.

Format: a GGUF file with `general.type` "imatrix" and, for a weight `W` with rows of n values and m
matrices (experts, else 1), `W.in_sum2` float32 [m, n], the sums of the squared inputs, and `W.counts`
float32 [m, 1], how many inputs were summed. Source: tools/imatrix and tools/quantize of llama.cpp.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quant.gguf import GGUFError, GGUFFile, open_gguf
from quant.types import TYPE_IDS

SUMS, COUNTS = ".in_sum2", ".counts"


def load_imatrix(path: Path) -> dict[str, np.ndarray]:
    """Mean squared input of each column, float32 [m * n] by weight name; 1 for experts never used.

    Raises GGUFError, also for files that hold no importance matrix or one with values that are not finite.
    """
    file = open_gguf(path)
    try:
        if file.metadata.get("general.type") != "imatrix":
            raise GGUFError(f"{path}: not an importance matrix (general.type is not 'imatrix')")
        names = [n.removesuffix(SUMS) for n in file.tensors if n.endswith(SUMS)]
        if not names:
            raise GGUFError(f"{path}: the importance matrix has no entries")
        return {name: _means(file, name) for name in names}
    finally:
        file.close()


def _means(file: GGUFFile, name: str) -> np.ndarray:
    sums, counts = _floats(file, name + SUMS), _floats(file, name + COUNTS)
    if counts.size != len(sums):
        raise GGUFError(f"{file.path}: {name}{COUNTS} has {counts.size} values, {len(sums)} are needed")
    counts = counts.reshape(-1, 1)
    used = counts > 0
    means = np.where(used, sums / np.where(used, counts, 1), np.float32(1)).astype(np.float32)
    if not np.isfinite(means).all() or (means < 0).any():
        raise GGUFError(f"{file.path}: {name}{SUMS} holds values that are not finite sums of squares")
    return means.reshape(-1)


def _floats(file: GGUFFile, name: str) -> np.ndarray:
    """A copy of a float32 tensor as [rows, row length]."""
    info = file.tensors.get(name)
    if info is None:
        raise GGUFError(f"{file.path}: tensor {name!r} is missing")
    if info.type != TYPE_IDS["F32"]:
        raise GGUFError(f"{file.path}: tensor {name!r} must be F32")
    return file.tensor_data(name).copy().view(np.float32).reshape(-1, info.shape[0])
