"""What tells one model from another, and what kept KV depends on besides its tokens.

KV that is kept on a disk must never meet anything else than what it was computed with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from hetero import __version__
from quant.gguf import GGUFFile

FINGERPRINT_BYTES = 16
SAMPLE = 4096  # bytes, at the start, in the middle and at the end of each tensor


def fingerprint(gguf: GGUFFile, layout: Iterable[str]) -> bytes:
    """16 bytes for a model, this version of hetero, and `layout`: how KV lies in the slots, in words.

    Of the model: the files' sizes and times of change, what its header says of the network, the list of
    tensors and samples of each. The times catch what samples may miss, such as one token's embedding; a
    model that is copied without them starts with an empty cache. Names and paths are free to change.
    """
    digest = _Digest()
    digest.add(__version__, *layout)
    for path in gguf.paths:
        stat = path.stat()
        digest.add("file", stat.st_size, stat.st_mtime_ns)
    digest.add_model(gguf)
    return digest.result


def model_digest(gguf: GGUFFile) -> bytes:
    """16 bytes for a model: the same on every machine and in however many files, another one for a model with
    other weights or another quantization. A fingerprint without version, layout and times.
    """
    digest = _Digest()
    digest.add_model(gguf)
    return digest.result


class _Digest:
    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)

    @property
    def result(self) -> bytes:
        return self._digest.digest()

    def add(self, *words: object) -> None:
        for word in words:
            text = str(word).encode()
            self._digest.update(len(text).to_bytes(8, "little") + text)

    def add_model(self, gguf: GGUFFile) -> None:
        for key, value in sorted(gguf.metadata.items()):
            told = isinstance(value, int | float | str | list)
            if told and not key.startswith(("tokenizer.", "general.", "split.")):
                self.add(key, value)
        for name, info in gguf.tensors.items():
            self.add(name, info.shape, info.type, info.nbytes)
            size = min(SAMPLE, info.nbytes)
            sample = np.empty(size, np.uint8)
            for start in sorted({0, (info.nbytes - size) // 2, info.nbytes - size}):
                gguf.read_into(name, start, sample)
                self._digest.update(sample.data)


__all__ = ["FINGERPRINT_BYTES", "fingerprint", "model_digest"]
