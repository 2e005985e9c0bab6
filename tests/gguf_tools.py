"""Writers of GGUF files for tests: hostile heads, small files, changed copies, tiny random models."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quant.gguf import open_gguf
from quant.types import GGML_TYPES, TYPE_IDS, row_bytes

VALUE_TYPES = {
    "u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "str": 8, "array": 9,
    "u64": 10, "i64": 11, "f64": 12,
}  # fmt: skip
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class Typed(NamedTuple):
    """A metadata value with the type it gets in the file, or the type of its elements."""

    type_name: str
    value: Any


class Raw(NamedTuple):
    """A tensor from its bytes. `shape` in ggml's order: row length first."""

    type_name: str
    shape: tuple[int, ...]
    data: bytes


def string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def head(n_tensors: int, n_kv: int, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, n_tensors, n_kv)


def kv(key: str | bytes, type_name: str, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", VALUE_TYPES[type_name]) + payload


def tensor_info(name: str | bytes, shape: tuple[int, ...], type_id: int = 0, offset: int = 0) -> bytes:
    dims = b"".join(struct.pack("<Q", d % 2**64) for d in shape)
    return string(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", type_id, offset)


def _scalar(type_id: int, value: Any) -> bytes:
    return string(value) if type_id == 8 else struct.pack("<" + _CODES[type_id], value)


def _guess(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "u32" if 0 <= value < 2**32 else "i64"
    return "f32" if isinstance(value, float) else "str"


def value_bytes(value: Any) -> bytes:
    """Type id and payload of a metadata value; sequences become arrays of their first element's type."""
    if isinstance(value, np.ndarray):
        names = {"float32": "f32", "int32": "i32", "uint32": "u32", "bool": "bool", "int8": "i8"}
        value = Typed(names[value.dtype.name], value.tolist())
    type_name, value = value if isinstance(value, Typed) else (None, value)
    if isinstance(value, (list, tuple)):
        element = VALUE_TYPES[type_name or _guess(value[0] if value else "")]
        items = b"".join(_scalar(element, v) for v in value)
        return struct.pack("<IIQ", VALUE_TYPES["array"], element, len(value)) + items
    type_id = VALUE_TYPES[type_name or _guess(value)]
    return struct.pack("<I", type_id) + _scalar(type_id, value)


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | Raw],
    alignment: int | None = None,
) -> Path:
    """A file with these values and tensors. Arrays are float32 or float16, their last axis the row."""
    if alignment is not None:
        metadata = {**metadata, "general.alignment": alignment}
    raws = {
        name: t
        if isinstance(t, Raw)
        else Raw({"float32": "F32", "float16": "F16"}[t.dtype.name], t.shape[::-1], t.tobytes())
        for name, t in tensors.items()
    }
    entries = [string(key) + value_bytes(value) for key, value in metadata.items()]
    return _write(path, entries, raws, alignment or 32)


def _write(path: Path, entries: list[bytes], tensors: Mapping[str, Raw], alignment: int) -> Path:
    out, offset = bytearray(head(len(tensors), len(entries)) + b"".join(entries)), 0
    for name, t in tensors.items():
        out += tensor_info(name, t.shape, TYPE_IDS[t.type_name], offset)
        offset += -(-len(t.data) // alignment) * alignment
    with path.open("wb") as file:
        file.write(out + bytes(-len(out) % alignment))
        for t in tensors.values():
            file.write(t.data)
            file.write(bytes(-len(t.data) % alignment))
    return path


def rewrite(
    path_in: Path, path_out: Path, changes: Mapping[str, Any], tensors: Mapping[str, Raw | None] | None = None
) -> Path:
    """A copy with some metadata values, or tensors, changed, added, or (None) left out."""
    data = path_in.read_bytes()
    n_tensors, n_kv = struct.unpack_from("<QQ", data, 8)
    pos, entries = 24, {}
    for _ in range(n_kv):
        start = pos
        pos = skip_value(data, pos, 8)
        key = data[start + 8 : pos].decode()
        (type_id,) = struct.unpack_from("<I", data, pos)
        pos = skip_value(data, pos + 4, type_id)
        entries[key] = data[start:pos]
    infos = {}
    for _ in range(n_tensors):
        start, pos = pos + 8, skip_value(data, pos, 8)
        name = data[start:pos].decode()
        (n_dims,) = struct.unpack_from("<I", data, pos)
        *dims, type_id, offset = struct.unpack_from(f"<{n_dims}QIQ", data, pos + 4)
        pos += 4 + 8 * n_dims + 12
        infos[name] = (tuple(dims), type_id, offset)
    base = -(-pos // 32) * 32
    raws = {}
    for name, (shape, type_id, offset) in infos.items():
        size = row_bytes(type_id, shape[0]) * int(np.prod(shape[1:], dtype=np.int64))
        start = base + offset
        raws[name] = Raw(GGML_TYPES[type_id].name, shape, data[start : start + size])
    for key, value in changes.items():
        entries.pop(key, None)
        if value is not None:
            entries[key] = string(key) + value_bytes(value)
    for name, tensor in (tensors or {}).items():
        raws.pop(name, None)
        if tensor is not None:
            raws[name] = tensor
    alignment = changes.get("general.alignment", 32)
    return _write(path_out, list(entries.values()), raws, alignment)


def split_gguf(path_in: Path, prefix: Path, parts: int) -> list[Path]:
    """A file's tensors in `parts` files beside each other, named and marked as llama.cpp does."""
    with open_gguf(path_in) as file:
        raws: dict[str, Raw | None] = {
            t.name: Raw(GGML_TYPES[t.type].name, t.shape, file.tensor_data(t.name).tobytes())
            for t in file.tensors.values()
        }
    size, paths = -(-len(raws) // parts), []
    for number in range(parts):
        keys = {"split.no": Typed("u16", number), "split.count": Typed("u16", parts)}
        keys["split.tensors.count"] = Typed("i32", len(raws))
        here = dict(list(raws.items())[number * size : (number + 1) * size])
        path = prefix.with_name(f"{prefix.name}-{number + 1:05d}-of-{parts:05d}.gguf")
        if number == 0:
            rewrite(path_in, path, keys, {name: None for name in raws if name not in here})
        else:
            write_gguf(path, keys, {name: raw for name, raw in here.items() if raw is not None})
        paths.append(path)
    return paths


def skip_value(data: bytes, pos: int, type_id: int) -> int:
    """The position after a value of this type."""
    if type_id in _CODES:
        return pos + struct.calcsize("<" + _CODES[type_id])
    if type_id == 8:
        return pos + 8 + struct.unpack_from("<Q", data, pos)[0]
    element, count = struct.unpack_from("<IQ", data, pos)
    pos += 12
    if element in _CODES:
        return pos + count * struct.calcsize("<" + _CODES[element])
    for _ in range(count):
        pos = skip_value(data, pos, element)
    return pos
