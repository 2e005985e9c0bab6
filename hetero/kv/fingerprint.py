"""What kept KV depends on besides its tokens. Kept on a disk, it must never meet anything else."""

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
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)

    def add(*words: object) -> None:
        for word in words:
            text = str(word).encode()
            digest.update(len(text).to_bytes(8, "little") + text)

    add(__version__, *layout)
    for path in gguf.paths:
        stat = path.stat()
        add("file", stat.st_size, stat.st_mtime_ns)
    for key, value in sorted(gguf.metadata.items()):
        if not key.startswith(("tokenizer.", "general.")) and isinstance(value, int | float | str | list):
            add(key, value)
    for name, info in gguf.tensors.items():
        add(name, info.shape, info.type, info.nbytes)
        size = min(SAMPLE, info.nbytes)
        sample = np.empty(size, np.uint8)
        for start in sorted({0, (info.nbytes - size) // 2, info.nbytes - size}):
            gguf.read_into(name, start, sample)
            digest.update(sample.data)
    return digest.digest()


__all__ = ["FINGERPRINT_BYTES", "fingerprint"]
