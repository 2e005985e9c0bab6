"""The file of a store: whole or absent.

    bytes  0  magic "hetstore"
           8  BLAKE2b-128 of all that follows
          24  BLAKE2b-128 of the tokenizer's fingerprint
          40  uint64 n, uint64 length of the scopes
          56  scopes: JSON list of strings; a scope's number is its index
           .  int32 [n] words, oldest first, and uint8 [n] counts, as in `spec.store_kernels`

All numbers are little-endian. It is written beside, synced and renamed; of two programs that save to one file
the later one wins. Others than its owner cannot read it: it holds what was asked and answered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import struct
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .store_kernels import SCOPES, TOKEN_BITS

log = logging.getLogger(__name__)

_MAGIC = b"hetstore"
_SIZES = struct.Struct("<QQ")
_HEAD = 56
_DIGEST = 16
_UNFINISHED_SECONDS = 3600


class Content(NamedTuple):
    """What a store knows."""

    scopes: list[str]
    words: np.ndarray  # int32 [n]
    counts: np.ndarray  # uint8 [n]


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        digest.update(part)
    return digest.digest()


def write(path: Path, fingerprint: bytes, content: Content) -> None:
    """Put `content` into the file, or leave it as it was. Raises OSError."""
    scopes = json.dumps(content.scopes).encode()
    words = np.ascontiguousarray(content.words, "<i4")
    counts = np.ascontiguousarray(content.counts, np.uint8)
    head = _digest(fingerprint) + _SIZES.pack(len(words), len(scopes))
    parts = (head, scopes, words.data.cast("B"), counts.data) if len(words) else (head, scopes)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(path)
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        beside.touch(0o600, exist_ok=False)
        with beside.open("wb") as file:
            file.write(_MAGIC + _digest(*parts))
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _remove_unfinished(path: Path) -> None:
    """Remove what programs that were killed left beside the file."""
    with contextlib.suppress(OSError):
        for beside in path.parent.iterdir():
            ours = beside.name.startswith(f"{path.name}.") and beside.suffix == ".tmp"
            if ours and time.time() - beside.stat().st_mtime > _UNFINISHED_SECONDS:
                beside.unlink()


def read(path: Path, fingerprint: bytes, vocab_size: int) -> Content | None:
    """What the file holds; None and a warning in the log when it is damaged or another tokenizer's."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("the speculation store starts empty: %s", error)
        return None
    try:
        return _parse(data, fingerprint, vocab_size)
    except ValueError as error:
        log.warning("the speculation store starts empty: %s %s", path, error)
        return None


def _parse(data: bytes, fingerprint: bytes, vocab_size: int) -> Content:
    view = memoryview(data)
    if len(data) < _HEAD or data[:8] != _MAGIC:
        raise ValueError("is no store of this version")
    if data[8:24] != _digest(view[24:]):
        raise ValueError("is damaged")
    if data[24:40] != _digest(fingerprint):
        raise ValueError("belongs to another tokenizer")
    n, scopes_length = _SIZES.unpack(view[40:_HEAD])
    start = _HEAD + scopes_length
    if len(data) != start + 5 * n:
        raise ValueError("is damaged: its lengths differ from its size")
    scopes = json.loads(data[_HEAD:start])
    words = np.frombuffer(data, "<i4", n, start)
    held = words[words != 0] - 1
    if not isinstance(scopes, list) or not all(isinstance(scope, str) for scope in scopes):
        raise ValueError("is damaged: its scopes are no list of names")
    if len(set(scopes)) < len(scopes):
        raise ValueError("is damaged: a scope is there twice")
    if len(scopes) > SCOPES or (len(held) and (held.min() < 0 or held.max() >> TOKEN_BITS >= len(scopes))):
        raise ValueError("is damaged: a scope is unknown")
    if len(held) and (held & ((1 << TOKEN_BITS) - 1)).max() >= vocab_size:
        raise ValueError("is damaged: a token is not in the vocabulary")
    return Content(scopes, words, np.frombuffer(data, np.uint8, n, start + 4 * n))
