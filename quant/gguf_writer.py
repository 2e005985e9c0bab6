"""The head of a GGUF file, from values and tensors (the format is drawn in quant/gguf_head.py)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

from quant.gguf_head import DEFAULT_ALIGNMENT, MAGIC, TensorInfo

_CODES = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
    "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9


def gguf_head(metadata: Mapping[str, object], tensors: Iterable[TensorInfo]) -> bytes:
    """Everything of a GGUF file up to its tensor data, padded to where that begins.

    The tensors' data must follow in the same order, each padded to 32 bytes; the offsets in `tensors`
    are those of another file and are not used. A value reads back as the same Python value: whole
    numbers are written as u64 or i64, other numbers as f64, arrays as what their `element` says. Raises
    ValueError for a value that GGUF has no type for.
    """
    infos = list(tensors)
    entries = {k: v for k, v in metadata.items() if k != "general.alignment"}
    out = bytearray(MAGIC + struct.pack("=IQQ", 3, len(infos), len(entries)))
    for key, value in entries.items():
        out += _string(key) + _value(key, value)
    offset = 0
    for info in infos:
        dims = struct.pack(f"={len(info.shape)}Q", *info.shape)
        out += _string(info.name) + struct.pack("=I", len(info.shape)) + dims
        out += struct.pack("=IQ", info.type, offset)
        offset += padded(info.nbytes)
    return bytes(out) + bytes(padded(len(out)) - len(out))


def padded(nbytes: int) -> int:
    """The size up to which a tensor, or the head, of `nbytes` is filled with zeros."""
    return -(-nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _value(key: str, value: object) -> bytes:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        element = getattr(value, "element", "str")
        if element == "str":
            items, type_id = b"".join(_string(str(v)) for v in value), _STRING
        else:
            type_id, code = _CODES[element]
            items = struct.pack(f"={len(value)}{code}", *value)
        return struct.pack("=IIQ", _ARRAY, type_id, len(value)) + items
    if isinstance(value, str):
        return struct.pack("=I", _STRING) + _string(value)
    kind = {bool: "bool", int: "u64", float: "f64"}.get(type(value))
    if kind is None:
        raise ValueError(f"{key!r}: GGUF has no type for {type(value).__name__}")
    if kind == "u64" and isinstance(value, int) and value < 0:
        kind = "i64"
    type_id, code = _CODES[kind]
    return struct.pack("=I" + code, type_id, value)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("=Q", len(raw)) + raw
