"""One vector of a whole text: its tokens' rows behind the model's last norm, pooled and brought to length 1.

`<architecture>.pooling_type` of a GGUF file says how: 1 mean, 2 CLS (the first token's row), 3 last, as in
`enum llama_pooling_type`; models that were made to generate do not say, and get the mean. As llama.cpp's
common_embd_normalize does, the vector is divided by its Euclidean length; one of zeros stays so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

MEAN, CLS, LAST = "mean", "cls", "last"
_OF_METADATA = {0: MEAN, 1: MEAN, 2: CLS, 3: LAST}  # 0: none, the rows are for whoever reads the file
DEFAULT = MEAN


def pooling_of(metadata: Mapping[str, Any]) -> str | None:
    """How a model's rows are pooled. None where that is no vector of the text, as with rerankers."""
    value = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    return DEFAULT if value is None else _OF_METADATA.get(value)


class Pool:
    """Takes in the rows of one text as steps give them, always in float64 and one after the other: the
    result is the same bits however the text was cut into steps."""

    def __init__(self, pooling: str):
        self._pooling = pooling
        self._sum: np.ndarray | None = None  # or the one row that counts
        self._count = 0

    def add(self, start: int, rows: np.ndarray) -> None:
        """Rows float32 [T, n_embd] of the tokens from `start` on; at 0 a text begins, also once more."""
        if start == 0:
            self._sum, self._count = None, 0
        if self._pooling == LAST:
            self._sum, self._count = rows[-1].astype(np.float64), 1
        elif self._pooling == MEAN:
            wide = rows.astype(np.float64)
            if self._sum is not None:
                wide = np.concatenate((self._sum[None], wide))
            self._sum, self._count = np.cumsum(wide, axis=0)[-1], self._count + len(rows)
        elif self._sum is None:
            self._sum, self._count = rows[0].astype(np.float64), 1

    def result(self) -> list[float]:
        """The vector [n_embd], in float32's precision. ValueError when it is not finite."""
        assert self._sum is not None, "no row came"
        vector = self._sum / self._count
        length = float(np.sqrt(np.sum(vector**2)))
        if not np.isfinite(length):
            raise ValueError("the model's rows are not finite")
        vector = vector / length if length else vector
        return vector.astype(np.float32).tolist()


def split_rows(rows: np.ndarray, counts: Iterable[int]) -> list[np.ndarray]:
    """A step's rows [T, n_embd], laid end to end, by request."""
    ends = np.cumsum(list(counts))
    return np.split(rows, ends[:-1])


__all__ = ["DEFAULT", "Pool", "pooling_of", "split_rows"]
