"""A folder of the disk tier whose blocks are known from their numbers."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from hetero.kv.disk_entry import groups_of
from hetero.kv.disk_folder import DiskFolder
from hetero.kv.prefix_tree import chain_key

MODEL, OTHER = b"m" * 16, b"o" * 16
SIZES = (700, 300)  # bytes of a block in each of two KV groups
LARGE = 1 << 30


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def key_of(number: int) -> bytes:
    return chain_key(bytes(16), [number])


def content(number: int, mask: int) -> list[np.ndarray]:
    return [np.random.default_rng([number, g]).integers(0, 256, SIZES[g], np.uint8) for g in groups_of(mask)]


def put(folder: DiskFolder, number: int, mask: int = 3) -> bool:
    return folder.put(key_of(number), mask, content(number, mask))


def get(folder: DiskFolder, number: int) -> bool:
    """Whether the block was there. What comes back is what was put, or nothing."""
    mask = folder.mask(key_of(number))
    if not mask:
        return False
    parts = [np.zeros(SIZES[g], np.uint8) for g in groups_of(mask)]
    if not folder.get(key_of(number), mask, parts):
        return False
    for part, right in zip(parts, content(number, mask), strict=True):
        np.testing.assert_array_equal(part, right)
    return True


def open_folder(path: Path, limit: int = LARGE, model: bytes = MODEL, clock=time.time) -> DiskFolder:
    folder = DiskFolder(path, limit, model, clock)
    folder.scan()
    return folder


def files(path: Path) -> list[Path]:
    """All entries, of all models."""
    return sorted(p for p in path.glob("*/??/*") if p.is_file())


def file_of(path: Path, number: int, model: bytes = MODEL) -> Path:
    (found,) = path.glob(f"{model.hex()}/??/{key_of(number).hex()}.*")
    return found
