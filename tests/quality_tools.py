"""Logits compared at once."""

from __future__ import annotations

import numpy as np

from quant.quality import Comparison, Summary


def compared(first: np.ndarray, second: np.ndarray, targets: np.ndarray) -> Summary:
    comparison = Comparison()
    comparison.add(first, second, targets)
    comparison.check_invariants()
    return comparison.summary()
