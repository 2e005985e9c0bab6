"""Slots in main memory for blocks of keys and values that have left a stage's device.

A slot of a KV group holds one block in all the stage's layers of that group, as the bytes lie in the pools:

    | layer a: keys | layer a: values | layer b: keys | layer b: values | ...     a < b

Slots lie side by side in chunks, and chunks one after another at offsets that follow from the sizes alone, so
that two processes that map the same memory agree on them. A chunk is asked for when one of its slots is first
used: an arena takes as much memory as was ever used of it.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from backends.base import BLOCK_SIZE, ModelSizes
from backends.kv_format import kv_homes, row_bytes

if TYPE_CHECKING:
    from backends.ggml.stage import StageSpec

CHUNK_BYTES = 32 << 20  # of slots that become memory together
ALIGNMENT = 16384  # of chunks: no two of them share a page, on any system
Allocate = Callable[[int, int], np.ndarray]  # offset in the arena, bytes: uint8 [bytes]


def anonymous(offset: int, nbytes: int) -> np.ndarray:
    """Memory of this process that goes back to the system as a whole."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def slot_sizes(config: ModelSizes, spec: StageSpec) -> tuple[int, ...]:
    """Bytes of a slot of each KV group at this stage; 0 of a group that has no layer here."""
    sizes = [0] * len(spec.num_blocks)
    for layer in sorted(set(kv_homes(config, range(spec.first, spec.last)).values())):
        heads, group = config.heads_of(layer), spec.group_of.get(layer)
        if group is not None and group < len(sizes):  # no states
            token = row_bytes(spec.key_type, heads.dim_k) + row_bytes(spec.value_type, heads.dim_v)
            sizes[group] += BLOCK_SIZE * heads.n * token
    return tuple(sizes)


class HostMemory:
    """`slots[group]` slots of `slot_bytes[group]` bytes each. See base.HostMemoryView.

    Any thread may ask for views. `close` gives the memory back; views that are still there keep theirs.
    """

    def __init__(self, slots: Sequence[int], slot_bytes: Sequence[int], allocate: Allocate = anonymous):
        self.slots, self._slot_bytes, self._allocate = tuple(slots), tuple(slot_bytes), allocate
        self._per_chunk = [
            max(1, CHUNK_BYTES // size) if size else n for n, size in zip(slots, slot_bytes, strict=True)
        ]
        self._chunks: dict[tuple[int, int], np.ndarray] = {}  # (group, number): uint8 [slots, slot bytes]
        self._addresses: dict[tuple[int, int], int] = {}
        self._starts: list[int] = []  # of the groups in the arena
        self._making, self._closed = threading.Lock(), False
        end = 0
        for n, size, per_chunk in zip(self.slots, self._slot_bytes, self._per_chunk, strict=True):
            self._starts.append(end)
            if n and size:
                whole, rest = divmod(n, per_chunk)
                end += whole * aligned(per_chunk * size) + aligned(rest * size)
        self.nbytes = end  # when all slots are in use

    @property
    def used_bytes(self) -> int:
        """Bytes of the chunks that were used so far."""
        return sum(chunk.nbytes for chunk in list(self._chunks.values()))

    def slot_bytes(self, group: int) -> int:
        return self._slot_bytes[group]

    def view(self, group: int, slot: int) -> np.ndarray:
        """The slot's bytes, uint8 [slot_bytes(group)], to read and to write."""
        assert 0 <= slot < self.slots[group]
        number, at = divmod(slot, self._per_chunk[group])
        return self._chunk(group, number)[at]

    def place(self, group: int, slot: int, count: int) -> tuple[int, int]:
        """(address of a slot, how many of the `count` slots from there on lie side by side)."""
        assert 0 <= slot < slot + count <= self.slots[group]
        number, at = divmod(slot, self._per_chunk[group])
        chunk = self._chunk(group, number)
        return self._addresses[group, number] + at * self._slot_bytes[group], min(count, len(chunk) - at)

    def close(self) -> None:
        """Idempotent."""
        with self._making:
            self._closed = True
            self._chunks.clear()
        close = getattr(self._allocate, "close", None)
        if close is not None:
            close()

    def check_invariants(self) -> None:
        assert self.used_bytes <= self.nbytes
        for (group, number), chunk in list(self._chunks.items()):
            assert chunk.shape == self._shape(group, number) and chunk.dtype == np.uint8

    def _chunk(self, group: int, number: int) -> np.ndarray:
        """Raises MemoryError or OSError where there is no memory for it, LookupError after `close`."""
        chunk = self._chunks.get((group, number))
        if chunk is None:
            with self._making:
                chunk = self._chunks.get((group, number))
                if self._closed:
                    raise LookupError("the stage of these host slots was closed")
                if chunk is None:
                    chunk = self._make(group, number)
                    self._addresses[group, number] = chunk.ctypes.data
                    self._chunks[group, number] = chunk
        return chunk

    def _make(self, group: int, number: int) -> np.ndarray:
        rows, size = self._shape(group, number)
        if not size:
            return np.empty((rows, 0), np.uint8)
        offset = self._starts[group] + number * aligned(self._per_chunk[group] * size)
        return self._allocate(offset, rows * size).reshape(rows, size)

    def _shape(self, group: int, number: int) -> tuple[int, int]:
        per_chunk = self._per_chunk[group]
        return min(per_chunk, self.slots[group] - number * per_chunk), self._slot_bytes[group]


def aligned(nbytes: int) -> int:
    """Up to the next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


__all__ = ["Allocate", "HostMemory", "aligned", "anonymous", "slot_sizes"]
