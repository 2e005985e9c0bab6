"""Greedy text is the same with guesses as without: alone or not, preempted, in stages, in any KV format."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from engine.answers import BASE, _run
from scale import FULL
from spec_tools import compute_all

from hetero import launch
from hetero.kv_types import parse_kv_types
from hetero.prepare import prepare
from hetero.settings import Settings
from hetero.stats import EngineStats
from hetero.text.tokenizer import Tokenizer

PROMPTS, TOKENS = (128, 64) if FULL else (6, 40)
LONGEST = 45  # tokens of a prompt
SOURCES = ("hetero/kv/prefix_tree.py", "hetero/config.py", "docs/config.md", "LICENSE", "CHANGELOG.md")
ON = dataclasses.replace(BASE, threads=1, kv_tokens=8192)
OFF = dataclasses.replace(ON, spec="off")


@pytest.fixture(scope="module", params=["smollm2", "gemma3"] if FULL else ["smollm2"])
def path(request, smollm2_path, gemma3_path) -> Path:
    return {"smollm2": smollm2_path, "gemma3": gemma3_path}[request.param]


def repeating_prompts(path: Path) -> list[list[int]]:
    """Pieces of files that begin anew where the answer goes on, and pieces that do not."""
    tokenizer, root = Tokenizer(path), Path(__file__).parents[2]
    prompts = []
    for i in range(PROMPTS):
        lines = (root / SOURCES[i % len(SOURCES)]).read_text().splitlines()[3 * i % 40 : 100]
        piece, again = lines[: 6 + i % 3], lines[: 2 if i % 3 else 0]
        text = "\n".join([*piece, *again])
        ids = tokenizer.encode(text, parse_special=False, add_special=True)
        prompts.append(ids[:1] + ids[1:][-LONGEST:])
    return prompts


def texts(path: Path, settings: Settings, batch: int) -> tuple[list[list[int]], EngineStats]:
    """Greedy answers, with all that is guessed computed, whatever it costs."""
    settings = dataclasses.replace(settings, model=str(path), max_num_seqs=batch)
    engine = launch.load(prepare(settings), settings, lambda *_: None)[0]._engine
    try:
        if engine.speculation is not None:
            compute_all(engine.speculation)
        out = _run(engine, repeating_prompts(path), batch, TOKENS)
        engine.check_invariants()
        return out, engine.stats()
    finally:
        engine.close()


def accepted(stats: EngineStats) -> int:
    assert stats.speculation is not None
    return sum(map(sum, stats.speculation.accepted.values()))


@pytest.fixture(scope="module")
def plain(path: Path) -> list[list[int]]:
    return texts(path, OFF, 8)[0]


@pytest.mark.parametrize("batch", [1, 8, 32] if FULL else [8])
def test_with_guesses(path: Path, plain: list[list[int]], batch: int):
    out, stats = texts(path, ON, batch)
    assert out == plain
    assert accepted(stats) > PROMPTS * TOKENS / 10, "hardly a guess was right"
    assert stats.steps < PROMPTS * TOKENS


def test_with_preemption(path: Path, plain: list[list[int]]):
    out, stats = texts(path, dataclasses.replace(ON, kv_tokens=192, ctx=192), 32)
    assert out == plain
    assert stats.preemptions > 0 and accepted(stats) > 0


def test_in_two_stages(path: Path, plain: list[list[int]]):
    layers = prepare(dataclasses.replace(ON, model=str(path))).config.n_layer
    split = (layers // 2, layers - layers // 2)
    settings = dataclasses.replace(
        BASE, device=("CPU:threads=1", "CPU:threads=1"), split=split, isolate="off"
    )
    out, stats = texts(path, settings, 8)
    assert out == plain
    assert accepted(stats) > PROMPTS * TOKENS / 10


@pytest.mark.skipif(not FULL, reason="HETERO_TEST_SCALE=full")
@pytest.mark.parametrize("kinds", ["fp8", "q8_0", "k=q8_0,v=fp8"])
def test_in_other_formats(path: Path, kinds: str):
    kv_type = parse_kv_types(kinds)
    out, stats = texts(path, dataclasses.replace(ON, kv_type=kv_type), 8)
    assert out == texts(path, dataclasses.replace(OFF, kv_type=kv_type), 8)[0]
    assert accepted(stats) > 0
