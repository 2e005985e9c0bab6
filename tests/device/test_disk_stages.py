"""Contexts that come back from a disk, into an engine that has never seen them, whatever its stages are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.answers import BASE, answers
from tiny_models import tiny_model

from hetero.config import OFF, FolderLimit
from hetero.kv.costs import MoveCosts
from hetero.kv_types import KVTypes
from hetero.launch import LaunchError, load, prepare
from hetero.plan import devices

TOKENS = 8
LLAMA: dict[str, Any] = {"arch": "llama", "n_layers": 3}
WINDOWS: dict[str, Any] = {
    "arch": "gemma3", "n_layers": 3, "sliding_window": 48, "sliding_window_pattern": 2
}  # fmt: skip
ONE: dict[str, Any] = {"threads": 1}
TWO: dict[str, Any] = {"device": ("CPU:threads=1",) * 2, "split": (1, 2)}


@pytest.fixture(autouse=True)
def always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices of one thread each on any machine, not pinned; a copy is always taken for cheaper."""
    around = devices.Around(cores=lambda: (), usable_cores=lambda: 8)
    monkeypatch.setattr(devices, "Around", lambda: around)
    monkeypatch.setattr(MoveCosts, "observe", lambda *_: None)


@pytest.mark.parametrize(
    ("model", "stages"),
    [(LLAMA, ONE), (WINDOWS, ONE | {"ram_cache": OFF}), (WINDOWS, TWO)],
    ids=["llama", "windows", "two stages"],
)
def test_the_same_text_as_alone_after_a_restart(
    model: dict[str, Any], stages: dict[str, Any], tmp_path: Path
) -> None:
    path, rng = tiny_model(tmp_path / "m.gguf", seed=5, **model), np.random.default_rng(2)
    shared = rng.integers(3, 300, 40).tolist()
    own = [rng.integers(3, 300, int(rng.integers(60, 130))).tolist() for _ in range(8)]
    prompts = [(shared if i % 2 else []) + ids for i, ids in enumerate(own)]
    small = dataclasses.replace(BASE, kv_tokens=512, ctx=192, max_num_batched_tokens=64, **ONE)
    alone, _ = answers(path, small, prompts, 1, tokens=TOKENS)
    kept = FolderLimit(str(tmp_path / "cache"), 64 << 20)
    tiered = dataclasses.replace(small, disk_cache=kept, **stages)
    got, stats = answers(path, tiered, prompts, 2, tokens=TOKENS)
    assert got == alone
    again, stats = answers(path, tiered, prompts, 2, tokens=TOKENS)
    assert again == alone
    assert stats.disk.entries >= stats.disk.loaded > 30 and stats.tokens_from["disk"] > 400
    assert stats.disk.damaged == stats.disk.failed == 0


def test_contexts_of_another_format_are_left_alone(tmp_path: Path) -> None:
    path, rng = tiny_model(tmp_path / "m.gguf", seed=5, **LLAMA), np.random.default_rng(2)
    prompts = [rng.integers(3, 300, 100).tolist()]
    kept = FolderLimit(str(tmp_path / "cache"), 64 << 20)
    f16 = dataclasses.replace(BASE, kv_tokens=512, ctx=192, disk_cache=kept, **ONE)
    for blocks, settings in ((6, f16), (12, dataclasses.replace(f16, kv_type=KVTypes("fp8", "fp8")))):
        _, stats = answers(path, settings, prompts, 2, tokens=TOKENS)
        assert stats.disk.loaded == stats.disk.damaged == 0
        assert len(list(tmp_path.glob("cache/*/??/*"))) == blocks
    _, stats = answers(path, f16, prompts, 2, tokens=TOKENS)
    assert stats.disk.loaded > 4


def test_a_folder_that_cannot_be_used_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tiny_model(tmp_path / "m.gguf")
    kept = FolderLimit(str(tmp_path / "file"), 64 << 20)
    settings = dataclasses.replace(BASE, model=str(path), disk_cache=kept, **ONE)
    with pytest.raises(LaunchError, match=r"--disk-cache .*file: "):
        load(prepare(settings), settings, lambda text, done: pytest.fail(text) if done else None)
    small = dataclasses.replace(settings, disk_cache=FolderLimit(str(tmp_path / "cache"), 1000))
    with pytest.raises(LaunchError, match=r"--disk-cache .*: one block of this model takes \d"):
        load(prepare(small), small, lambda text, done: pytest.fail(text) if done else None)
    assert not (tmp_path / "cache").exists()
