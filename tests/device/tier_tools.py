"""Tiny models, stages and contexts for the tests of the RAM and disk tiers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from engine.answers import BASE

from hetero.kv.costs import MoveCosts
from hetero.plan import devices

LLAMA: dict[str, Any] = {"arch": "llama", "n_layers": 3}
WINDOWS: dict[str, Any] = {
    "arch": "gemma3", "n_layers": 3, "sliding_window": 48, "sliding_window_pattern": 2
}  # fmt: skip
ONE: dict[str, Any] = {"threads": 1}
TWO: dict[str, Any] = {"device": ("CPU:threads=1",) * 2, "split": (1, 2)}
SMALL = dataclasses.replace(BASE, kv_tokens=512, ctx=192, max_num_batched_tokens=64, max_num_seqs=2, **ONE)


def same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices of one thread each on any machine, not pinned; a copy is always taken for cheaper."""
    around = devices.Around(cores=lambda: (), usable_cores=lambda: 8)
    monkeypatch.setattr(devices, "Around", lambda: around)
    monkeypatch.setattr(MoveCosts, "observe", lambda *_: None)


def contexts(count: int) -> list[list[int]]:
    """Every second one begins like the others."""
    rng = np.random.default_rng(2)
    shared = rng.integers(3, 300, 40).tolist()
    own = [rng.integers(3, 300, int(rng.integers(60, 130))).tolist() for _ in range(count)]
    return [(shared if i % 2 else []) + ids for i, ids in enumerate(own)]
