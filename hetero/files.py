"""Files: written so that there is never half of one, and told of for people."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Put `text` at `path` as UTF-8, all or nothing: written beside it, then renamed. Raises OSError."""
    beside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        with beside.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Why a text file could not be read, for people."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8"
    return error.strerror or str(error)


def file_name(path: str) -> str:
    """The last part of a path, of whichever system it is."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]
