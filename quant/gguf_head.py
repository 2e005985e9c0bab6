"""The head of a GGUF file, versions 2 and 3 (docs/gguf.md in ggml-org/ggml).

A file is written by strangers: every count, length and offset is compared with the bytes that are
really there before it is used, so a hostile file costs one error line, not memory or time. Big arrays
(a vocabulary) are decoded when someone looks at them.

    | magic "GGUF" | u32 version | u64 n_tensors | u64 n_kv |
    | n_kv x     key: str | u32 type | value                                   |
    | n_tensors x name: str | u32 n_dims | n_dims x u64 | u32 type | u64 offset |
    | padding to `general.alignment` | tensor data, each offset relative to here |
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from quant.gguf_arrays import (
    ARRAY,
    BOOL,
    READ_U32,
    READ_U64,
    STRING,
    STRUCTS,
    TYPE_NAMES,
    U16,
    ArrayValue,
    LazyArray,
    decode_array,
)
from quant.types import GGML_TYPES, row_bytes

MAGIC = b"GGUF"
DAMAGED = "the file is damaged or has not arrived whole: download it again"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_KV = 1 << 16
MAX_TENSORS = 1 << 18
MAX_STRINGS = 1 << 24  # strings in all arrays together: bounds the time of the walk over them
MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 63  # GGML_MAX_NAME less its terminator
MAX_DIMS = 4
MAX_PARTS = 0xFFFF
LAZY_FROM = 1024  # arrays at least this long are decoded on first use
_FAMILY = re.compile(r"[\w.-]{0,64}", re.ASCII)


class GGUFError(ValueError):
    """The file cannot be used. One line that names the file and the key or tensor."""


class TensorInfo(NamedTuple):
    """Where one tensor lies.

    `shape` is in ggml's order: row length first. `offset` is in bytes from the start of the file, which of
    a split model is part number `part`, counted from 0.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    nbytes: int
    part: int = 0


class Head(NamedTuple):
    """What stands before the tensors' data. A file that is not split is part 0 of 1.

    The metadata ends at byte `metadata_end`.
    """

    version: int
    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]
    number: int
    parts: int
    all_tensors: int | None
    metadata_end: int


class HeadParser:
    """One pass over the head of the file. `pos` never passes `size` before it is checked."""

    def __init__(self, path: Path, view: memoryview):
        self.path = path
        self.view = view
        self.size = len(view)
        self.pos = 4
        self.num_strings = 0

    def fail(self, message: str, remedy: str = DAMAGED) -> GGUFError:
        return GGUFError(f"{self.path}: {message}; {remedy}")

    def take(self, fmt: struct.Struct, what: str):
        """The next value of a fixed-size type."""
        if self.pos + fmt.size > self.size:
            raise self.fail(f"{what} is cut off: the file ends at byte {self.size}")
        (value,) = fmt.unpack_from(self.view, self.pos)
        self.pos += fmt.size
        return value

    def take_string(self, what: str, max_bytes: int | None = None) -> str:
        length = self.take(READ_U64, what)
        if max_bytes is not None and not 0 < length <= max_bytes:
            raise self.fail(f"{what} has {length} bytes; it must have 1 to {max_bytes}")
        if length > self.size - self.pos:
            raise self.fail(f"{what} announces {length} bytes, the file has {self.size - self.pos} left")
        raw = bytes(self.view[self.pos : self.pos + length])
        self.pos += length
        if max_bytes is None:
            return raw.decode("utf-8", "replace")
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not valid UTF-8") from None
        if not name.isprintable():
            raise self.fail(f"{what} holds control characters")
        return name

    def parse(self) -> Head:
        """Everything before the tensors' data. Raises GGUFError."""
        version = self.take(READ_U32, "the version")
        if version not in VERSIONS:
            if version and version & 0xFFFF == 0:
                raise self.fail(
                    "the byte order of this file does not match this machine",
                    "convert it with llama.cpp's gguf_convert_endian.py, or download one for this machine",
                )
            raise self.fail(
                f"GGUF version {version} is not supported (2 and 3 are)",
                "convert the model again with a llama.cpp of today",
            )
        n_tensors = self.take(READ_U64, "the tensor count")
        n_kv = self.take(READ_U64, "the metadata count")
        left = self.size - self.pos
        if n_kv > MAX_KV or n_kv * 13 > left:
            raise self.fail(f"announces {n_kv} metadata entries, more than it can hold")
        if n_tensors > MAX_TENSORS or n_tensors * 32 > left:
            raise self.fail(f"announces {n_tensors} tensors, more than it can hold")
        metadata: dict[str, object] = {}
        types: dict[str, int] = {}
        for index in range(n_kv):
            key = self.take_string(f"the key of metadata entry {index}", MAX_KEY_BYTES)
            if key in metadata:
                raise self.fail(f"metadata key {key!r} occurs twice")
            types[key] = self.take(READ_U32, f"the type of {key!r}")
            metadata[key] = self.take_value(key, types[key])
        alignment, metadata_end = self.check_metadata(metadata, types), self.pos
        infos = [self.take_tensor_info(index, alignment) for index in range(n_tensors)]
        tensors, end = self.place_tensors(infos, alignment)
        if bytes(self.view[end : end + 4]) == MAGIC:
            raise self.fail(
                "another GGUF file follows in it; do not join the parts of a split model with cat",
                "leave them in one folder and name the first",
            )
        return Head(version, metadata, tensors, *self.split_of(metadata, types), metadata_end)

    def take_value(self, key: str, value_type: int) -> object:
        what = f"the value of {key!r}"
        if value_type in STRUCTS:
            if value_type == BOOL:
                flag = self.take(STRUCTS[0], what)
                if flag > 1:
                    raise self.fail(f"{key!r} is neither true nor false but {flag}")
                return bool(flag)
            return self.take(STRUCTS[value_type], what)
        if value_type == STRING:
            return self.take_string(what)
        if value_type != ARRAY:
            raise self.fail(f"{key!r} has the unknown type {value_type}")
        elem_type = self.take(READ_U32, what)
        count = self.take(READ_U64, what)
        start = self.pos
        if elem_type == STRING:
            self.skip_strings(key, count)
        elif elem_type in STRUCTS:
            if count * STRUCTS[elem_type].size > self.size - start:
                raise self.fail(f"{key!r} announces {count} elements, more than the file holds")
            self.pos += count * STRUCTS[elem_type].size
        elif elem_type == ARRAY:
            raise self.fail(f"{key!r} is an array of arrays, which is not supported", "convert it without")
        else:
            raise self.fail(f"{key!r} is an array of the unknown type {elem_type}")
        view = self.view[start : self.pos]
        if count >= LAZY_FROM:
            return LazyArray(view, elem_type, count)
        return ArrayValue(decode_array(view, elem_type, count), TYPE_NAMES[elem_type])

    def skip_strings(self, key: str, count: int) -> None:
        """Walk over `count` strings, checking each length. The hot loop of opening a model."""
        self.num_strings += count
        if count * 8 > self.size - self.pos or self.num_strings > MAX_STRINGS:
            raise self.fail(f"{key!r} announces {count} strings, more than the file may hold")
        unpack, view, last, pos = READ_U64.unpack_from, self.view, self.size - 8, self.pos
        for index in range(count):
            if pos > last:
                raise self.fail(f"{key!r} is cut off at string {index} of {count}")
            pos += 8 + unpack(view, pos)[0]
        if pos > self.size:
            raise self.fail(f"{key!r} is cut off in its last string")
        self.pos = pos

    def check_metadata(self, metadata: Mapping[str, object], types: Mapping[str, int]) -> int:
        """The alignment in bytes, once the keys that rule the rest of the file are sound."""
        if types.get("general.architecture", STRING) != STRING:
            raise self.fail("general.architecture is not a string")
        family = metadata.get("general.architecture", "")
        if not _FAMILY.fullmatch(str(family)):
            raise self.fail(f"general.architecture is {str(family)[:40]!r}, which is no family's name")
        if "general.alignment" not in metadata:
            return DEFAULT_ALIGNMENT
        alignment = metadata["general.alignment"]
        if types["general.alignment"] != 4 or not isinstance(alignment, int):
            name = TYPE_NAMES[types["general.alignment"]]
            raise self.fail(f"general.alignment must be of type u32, not {name}")
        if not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.fail(
                f"general.alignment is {alignment}; it must be a power of two up to {MAX_ALIGNMENT}"
            )
        return alignment

    def split_of(
        self, metadata: Mapping[str, object], types: Mapping[str, int]
    ) -> tuple[int, int, int | None]:
        """split.no, split.count (0 and 1 in a file that is no part) and split.tensors.count."""
        found: dict[str, int | None] = {}
        for key in ("no", "count", "tensors.count"):
            value = metadata.get(f"split.{key}")
            if isinstance(value, bool) or not isinstance(value, int | None):
                raise self.fail(f"split.{key} is not an integer")
            found[key] = value
        number, count = found["no"], found["count"]
        if count is None or count in (0, 1):
            return 0, 1, None
        if number is None or not 0 <= number < count <= MAX_PARTS:
            raise self.fail(
                f"split.no is {number} and split.count {count}: no part of a split model has these"
            )
        for key in ("split.no", "split.count"):
            if types[key] != U16:  # libllama takes nothing else for it, and aborts
                raise self.fail(f"{key} must be of type u16, not {TYPE_NAMES[types[key]]}")
        return number, count, found["tensors.count"]

    def take_tensor_info(self, index: int, alignment: int) -> TensorInfo:
        """The next tensor, with its offset still relative to the data section."""
        name = self.take_string(f"the name of tensor {index}", MAX_NAME_BYTES)
        what = f"tensor {name!r}"
        n_dims = self.take(READ_U32, what)
        if not 1 <= n_dims <= MAX_DIMS:
            raise self.fail(f"{what} has {n_dims} dimensions; 1 to {MAX_DIMS} are possible")
        shape = tuple(self.take(READ_U64, what) for _ in range(n_dims))
        type_id = self.take(READ_U32, what)
        offset = self.take(READ_U64, what)
        if type_id not in GGML_TYPES:
            raise self.fail(
                f"{what} has the unknown or removed type {type_id}",
                "take another quantization of the model, or a newer hetero",
            )
        if 0 in shape:
            raise self.fail(f"{what} has an empty dimension")
        try:
            nbytes = row_bytes(type_id, shape[0])
        except ValueError as error:
            raise self.fail(f"{what}: {error}") from None
        for dim in shape[1:]:
            nbytes *= dim
        if nbytes > self.size:
            raise self.fail(f"{what} needs {nbytes} bytes, more than the whole file ({self.size})")
        if offset % alignment:
            raise self.fail(f"{what} starts at {offset}, which is not a multiple of {alignment}")
        return TensorInfo(name, shape, type_id, offset, nbytes)

    def place_tensors(self, infos: list[TensorInfo], alignment: int) -> tuple[dict[str, TensorInfo], int]:
        """Tensors by name with absolute offsets, none outside the file, none over another; and their end."""
        last = data = -(-self.pos // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for info in infos:
            if info.name in tensors:
                raise self.fail(f"tensor {info.name!r} occurs twice")
            end = data + info.offset + info.nbytes
            if end > self.size:
                raise self.fail(
                    f"tensor {info.name!r} ends at byte {end}, the file at {self.size}: truncated?"
                )
            last = max(last, -(-end // alignment) * alignment)
            tensors[info.name] = info._replace(offset=data + info.offset)
        previous = None
        for info in sorted(tensors.values(), key=lambda t: t.offset):
            if previous is not None and info.offset < previous.offset + previous.nbytes:
                raise self.fail(f"tensors {previous.name!r} and {info.name!r} overlap")
            previous = info
        return tensors, last
