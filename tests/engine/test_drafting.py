"""A draft model for a real one: its guesses change no answer, and it is left alone where it is no use."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from engine.answers import BASE, _run, make_prompts
from engine.conftest import _plain
from spec_tools import compute_all
from tiny_models import tiny_model

import hetero.drafting
from hetero import launch
from hetero.engine import Engine
from hetero.prepare import prepare, require_fit
from hetero.settings import Settings
from quant.gguf import open_gguf

PROMPTS, TOKENS = 4, 32
ON = dataclasses.replace(BASE, ctx=512, kv_tokens=4096, threads=1, max_num_seqs=PROMPTS)


def loaded(path: Path, **changes) -> tuple[Engine, list[str]]:
    """An engine, and what its start table says of the draft model."""
    settings: Settings = dataclasses.replace(ON, model=str(path), **changes)
    prepared = prepare(settings)
    require_fit(prepared)
    engine, places = launch.load(prepared, settings, lambda *_: None)
    return engine._engine, [place.what for place in places if place.weights and place.kv]


@pytest.fixture(scope="module")
def prompts(smollm2_path: Path) -> list[list[int]]:
    return make_prompts(smollm2_path, PROMPTS, 100)


@pytest.fixture(scope="module")
def plain(smollm2_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    engine, _ = loaded(smollm2_path, spec="off")
    try:
        return _run(engine, prompts, PROMPTS, TOKENS)
    finally:
        engine.close()


@pytest.mark.parametrize("stages", [1, 2])
def test_a_model_guesses_its_own_text(smollm2_path, prompts, plain, stages, monkeypatch) -> None:
    monkeypatch.setattr(hetero.drafting, "best_length", lambda *_: 6)
    split = {} if stages == 1 else {"device": ("CPU:threads=1",) * 2, "split": (10, 20), "isolate": "off"}
    engine, places = loaded(smollm2_path, spec=f"ngram,draft:{smollm2_path}", **split)
    try:
        assert places[-1] == f"draft model {smollm2_path.stem}" and len(places) == stages + 1
        compute_all(engine.speculation)
        assert _run(engine, prompts, PROMPTS, TOKENS) == plain
        engine.check_invariants()
        stats = engine.stats().speculation
        drafted, accepted = stats.drafted["draft"], sum(stats.accepted["draft"])
        assert drafted > PROMPTS * TOKENS / 3
        assert accepted > 0.95 * drafted
        assert engine.stats().steps < TOKENS and 0 < stats.draft_seconds < engine.stats().step_seconds
    finally:
        engine.close()


def test_a_model_that_knows_nothing_is_soon_left_alone(smollm2_path, prompts, plain, tmp_path) -> None:
    with open_gguf(smollm2_path) as file:
        vocabulary = {k: _plain(v) for k, v in file.metadata.items() if k.startswith("tokenizer.ggml.")}
    path = tiny_model(tmp_path / "tiny.gguf", metadata=vocabulary)
    engine, _ = loaded(smollm2_path, spec=f"ngram,draft:{path}")
    model = engine.speculation._drafting.model
    try:
        assert _run(engine, prompts, PROMPTS, TOKENS) == plain
        steps = model._step_id
        assert steps > 8, "it was tried"
        assert _run(engine, prompts, PROMPTS, TOKENS) == plain
        assert model._step_id - steps <= TOKENS, "and hardly ever again"
        engine.check_invariants()
        assert sum(engine.stats().speculation.accepted["draft"]) <= 2
    finally:
        engine.close()
