"""Types of metadata values in a GGUF file, and its arrays, the long ones decoded on first use."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

# Value type ids of the format. Integers are in the machine's own byte order: a file in the other
# order is refused, since its weights would be in that order too.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRUCTS = {t: struct.Struct("=" + f) for t, f in SCALARS.items()}
DTYPES = {t: np.dtype("=" + f) if f != "?" else np.dtype("u1") for t, f in SCALARS.items()}
TYPE_NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "str", "array", "u64", "i64", "f64")
READ_U32, READ_U64 = STRUCTS[4], STRUCTS[10]
U16, BOOL, STRING, ARRAY = 2, 7, 8, 9


class ArrayValue(list):
    """A short metadata array. `element` is the type of its elements in the file, as "i32" or "str"."""

    def __init__(self, items: list, element: str):
        super().__init__(items)
        self.element = element


class LazyArray(Sequence):
    """A long metadata array, decoded as a whole on first access. Its bounds are already checked.

    `element` is the type of its elements in the file, as "i32" or "str".
    """

    def __init__(self, view: memoryview, elem_type: int, count: int):
        self._view = view
        self._items: list | None = None
        self.element = TYPE_NAMES[elem_type]
        self._elem_type = elem_type
        self._count = count

    def _decoded(self) -> list:
        if self._items is None:
            self._items = decode_array(self._view, self._elem_type, self._count)
        return self._items

    def raw_strings(self) -> list[bytes]:
        """The elements of an array of strings as they are in the file, which must be open."""
        assert self._elem_type == STRING
        return _split_strings(self._view, self._count)

    def release(self) -> None:
        """Let go of the file. What was not decoded before then is lost."""
        self._view.release()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index):
        return self._decoded()[index]

    def __iter__(self):
        return iter(self._decoded())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self._count} x {self.element}>"


def decode_array(view: memoryview, elem_type: int, count: int) -> list:
    """`count` elements of a checked array as Python values."""
    if elem_type != STRING:
        values = np.frombuffer(view, DTYPES[elem_type], count)
        return (values != 0).tolist() if elem_type == BOOL else values.tolist()
    return [raw.decode("utf-8", "replace") for raw in _split_strings(view, count)]


def _split_strings(view: memoryview, count: int) -> list[bytes]:
    """The texts of a checked array of strings."""
    raw = bytes(view)
    out, pos, unpack = [], 0, READ_U64.unpack_from
    for _ in range(count):
        start = pos + 8
        pos = start + unpack(raw, pos)[0]
        out.append(raw[start:pos])
    return out
