"""Contexts that left the pools go on as if they had never left, whatever the stages are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from engine import answers as run
from engine.answers import answers
from tier_tools import LLAMA, ONE, SMALL, TWO, WINDOWS, contexts, same_everywhere
from tiny_models import tiny_model

from hetero import launch
from hetero.prepare import prepare
from hetero.settings import FolderLimit

TOKENS = 10


@pytest.fixture(autouse=True)
def always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    same_everywhere(monkeypatch)


@pytest.mark.parametrize(
    ("model", "stages"),
    [(LLAMA, ONE), (WINDOWS, ONE), (WINDOWS, TWO), (WINDOWS, TWO | {"isolate": "all"})],
    ids=["llama", "windows", "two stages", "in processes of their own"],
)
def test_the_same_text_as_alone(model: dict[str, Any], stages: dict[str, Any], tmp_path: Path) -> None:
    """Ten contexts, two at a time, through pools with room for four, three times."""
    path, prompts = tiny_model(tmp_path / "m.gguf", seed=5, **model), contexts(10)
    alone, _ = answers(path, SMALL, prompts, 1, tokens=TOKENS)
    tiered = dataclasses.replace(SMALL, ram_cache=64 << 20, **stages)
    got, stats = answers(path, tiered, prompts, 2, tokens=TOKENS, rounds=3)
    assert got == alone
    moves = stats.moves
    assert min(moves.spilled_blocks, moves.loaded_blocks) > 50 and stats.tokens_from["host"] > 1000


def test_from_the_disk_to_stages_in_processes_of_their_own(tmp_path: Path) -> None:
    """The slots of two processes make one file, and its bytes go back to both after a restart."""
    path, prompts = tiny_model(tmp_path / "m.gguf", seed=5, **WINDOWS), contexts(6)
    alone, _ = answers(path, SMALL, prompts, 1, tokens=TOKENS)
    disk = FolderLimit(str(tmp_path / "cache"), 1 << 30)
    settings = dataclasses.replace(SMALL, model=str(path), disk_cache=disk, isolate="all", **TWO)
    for round_ in range(2):
        engine = launch.load(prepare(settings), settings, lambda *_: None)[0]._engine
        try:
            assert run._run(engine, prompts, 2, TOKENS) == alone
            engine.write_behind(30)
            assert (engine.stats().tokens_from.get("disk", 0) > 100) == (round_ == 1)
        finally:
            engine.close()
