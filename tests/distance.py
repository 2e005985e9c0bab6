"""How far arrays of numbers are from what they should be."""

from __future__ import annotations

import numpy as np


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """The norm of the difference, as a part of what is wanted."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
