"""Writes importance matrices in GGUF, as llama.cpp's llama-imatrix does and its quantizer reads.

Metadata: `general.type` "imatrix", `imatrix.datasets` (names of the texts), `imatrix.chunk_count` and
`imatrix.chunk_size` (windows, and tokens in each). Tensors, F32, for each weight W with rows of n
values and m matrices (experts, else 1): `W.in_sum2` [n, m], the sums of the squared inputs, and `W.counts`
[1, m], how many inputs were summed. Source: tools/imatrix of llama.cpp; docs/gguf.md of ggml for the
container.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from quant.imatrix import COUNTS, SUMS
from quant.types import TYPE_IDS

ALIGNMENT = 32  # GGUF's default
_U32, _STRING, _ARRAY = 4, 8, 9  # gguf_metadata_value_type


def save_imatrix(
    path: Path,
    sums: Mapping[str, np.ndarray],
    counts: Mapping[str, np.ndarray],
    tokens: int,
    datasets: Sequence[str],
    chunk_size: int,
) -> None:
    """Write the sums of squares by weight name, in place of what is at `path`: [n] over `tokens` inputs, or
    of experts [m, n] over `counts` [m] of that name.

    The file appears whole or not at all. Raises OSError.
    """
    values = {
        "general.type": struct.pack("<I", _STRING) + _string("imatrix"),
        "imatrix.datasets": struct.pack("<IIQ", _ARRAY, _STRING, len(datasets))
        + b"".join(map(_string, datasets)),
        "imatrix.chunk_count": struct.pack("<II", _U32, tokens // chunk_size),
        "imatrix.chunk_size": struct.pack("<II", _U32, chunk_size),
    }
    tensors = {}
    for name in sorted(sums):
        tensors[name + SUMS] = sums[name].astype("<f4")
        tensors[name + COUNTS] = np.reshape(counts.get(name, tokens), -1).astype("<f4")
    head, offset = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(values)), 0
    head += b"".join(_string(key) + value for key, value in values.items())
    for name, data in tensors.items():
        matrices = data.size if name.endswith(COUNTS) else data.size // data.shape[-1]
        shape = (data.size // matrices, matrices)
        head += _string(name) + struct.pack("<IQQIQ", 2, *shape, TYPE_IDS["F32"], offset)
        offset += data.nbytes + _padding(data.nbytes)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(head + bytes(_padding(len(head))))
            for data in tensors.values():
                file.write(data.tobytes() + bytes(_padding(data.nbytes)))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "replace")
    return struct.pack("<Q", len(raw)) + raw


def _padding(nbytes: int) -> int:
    return -nbytes % ALIGNMENT
