"""The part of a model that one stage needs, as a GGUF file of its own that is never written here.

It holds the metadata that read_config looks at, not the vocabulary, and the tensors of stage_weights. Its
SHA-256 names it: a worker that has a file of that name need not be sent it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import numpy as np

from backends.ggml.models.config import VOCABULARY_KEY, ModelConfig
from backends.ggml.stage import stage_weights
from quant.gguf import GGUFFile
from quant.gguf_writer import gguf_head, padded

CHUNK = 4 << 20  # bytes per message
# of parts of open files: a connection that comes back is not to read all weights again
_hashes: WeakKeyDictionary[GGUFFile, dict[tuple[int, int], str]] = WeakKeyDictionary()


class ModelPart:
    """Layers [first, last) of a model. The same layers of the same file give the same bytes."""

    def __init__(self, gguf: GGUFFile, config: ModelConfig, first: int, last: int):
        wanted = dict.fromkeys(stage_weights(config, gguf, first, last))
        self._gguf = gguf
        self._infos = [gguf.tensors[name] for name in wanted]
        keys = ("general.architecture", "general.name")
        prefix = f"{gguf.architecture}."
        metadata = {k: v for k, v in gguf.metadata.items() if k in keys or k.startswith(prefix)}
        self._head = gguf_head(metadata | {VOCABULARY_KEY: config.n_vocab}, self._infos)
        self.nbytes = len(self._head) + sum(padded(i.nbytes) for i in self._infos)
        self._layers = (first, last)

    def chunks(self) -> Iterator[np.ndarray]:
        """The file, as uint8 arrays of at most CHUNK bytes; views of the model where they can be."""
        yield np.frombuffer(self._head, np.uint8)
        for info in self._infos:
            data = self._gguf.tensor_data(info.name)
            for start in range(0, info.nbytes, CHUNK):
                yield data[start : start + CHUNK]
            if padded(info.nbytes) > info.nbytes:
                yield np.zeros(padded(info.nbytes) - info.nbytes, np.uint8)

    def sha256(self) -> str:
        """Of the file, in hexadecimal. Reads all its weights the first time."""
        known = _hashes.setdefault(self._gguf, {})
        if self._layers not in known:
            digest = hashlib.sha256()
            for chunk in self.chunks():
                digest.update(chunk.data)
            known[self._layers] = digest.hexdigest()
        return known[self._layers]
