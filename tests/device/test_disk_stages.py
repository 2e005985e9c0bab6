"""Contexts that come back from a disk, into an engine that has never seen them, whatever its stages are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.answers import BASE, answers
from tier_tools import LLAMA, ONE, SMALL, TWO, WINDOWS, contexts, same_everywhere
from tiny_models import tiny_model

from hetero.kv_types import KVTypes
from hetero.launch import load
from hetero.prepare import LaunchError, prepare
from hetero.settings import OFF, FolderLimit

TOKENS = 8


@pytest.fixture(autouse=True)
def always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    same_everywhere(monkeypatch)


@pytest.mark.parametrize(
    ("model", "stages"),
    [(LLAMA, ONE), (WINDOWS, ONE | {"ram_cache": OFF}), (WINDOWS, TWO)],
    ids=["llama", "windows", "two stages"],
)
def test_the_same_text_as_alone_after_a_restart(
    model: dict[str, Any], stages: dict[str, Any], tmp_path: Path
) -> None:
    path, prompts = tiny_model(tmp_path / "m.gguf", seed=5, **model), contexts(8)
    alone, _ = answers(path, SMALL, prompts, 1, tokens=TOKENS)
    kept = FolderLimit(str(tmp_path / "cache"), 64 << 20)
    tiered = dataclasses.replace(SMALL, disk_cache=kept, **stages)
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
