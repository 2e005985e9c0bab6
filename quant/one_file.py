"""The end of an executable that has an application, settings and a model behind the program proper.

    | program | application: zstd | padding | model: GGUF | index: JSON | footer |

The footer's integers are little-endian. Its reader in C, with the application's format, is build/launcher.c.
The index is {"settings": {NAME: VALUE}, "model": {"name": NAME, "offset": BYTES, "size": BYTES}}, each
perhaps absent; an index of no bytes is an empty one. The model begins at a multiple of ALIGNMENT, so that it
can be mapped on any system.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

MAGIC = b"hetero file 1\n\0\0"
ALIGNMENT = 1 << 16
MAX_INDEX = 1 << 20
_FOOTER = struct.Struct("<16s5Q16s")
FOOTER_BYTES = _FOOTER.size


class Footer(NamedTuple):
    """Where things are, in bytes from the start. `app_key` names the application: 16 hex digits."""

    app_offset: int
    app_size: int
    app_unpacked: int
    index_offset: int
    index_size: int
    app_key: bytes

    def packed(self) -> bytes:
        return _FOOTER.pack(MAGIC, *self)


class ModelSpan(NamedTuple):
    """A GGUF inside the file: `size` bytes from `offset` on."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What an executable has inside besides the application."""

    footer: Footer
    settings: dict[str, Any] = field(default_factory=dict)
    model: ModelSpan | None = None


def read_contents(file: BinaryIO) -> Contents | None:
    """What the open file has at its end; None when it is no such executable, or a damaged one."""
    size = file.seek(0, 2)
    if size < FOOTER_BYTES:
        return None
    file.seek(size - FOOTER_BYTES)
    magic, *values = _FOOTER.unpack(file.read(FOOTER_BYTES))
    footer = Footer(*values)
    end = size - FOOTER_BYTES
    if magic != MAGIC or footer.index_size > MAX_INDEX or footer.index_offset + footer.index_size != end:
        return None
    file.seek(footer.index_offset)
    try:
        index = json.loads(file.read(footer.index_size) or b"{}")
        model = ModelSpan(**index["model"]) if "model" in index else None
        settings = index.get("settings", {})
        if model is not None and not 0 <= model.offset <= model.offset + model.size <= footer.index_offset:
            return None
    except (ValueError, TypeError, AttributeError):
        return None
    return Contents(footer, settings, model) if isinstance(settings, dict) else None


def contents_of(path: Path) -> Contents | None:
    """`read_contents` of the file at `path`. Raises OSError."""
    with path.open("rb") as file:
        return read_contents(file)
