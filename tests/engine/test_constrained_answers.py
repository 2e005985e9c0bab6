"""Constrained text is the same alone without guesses, and beside other requests with them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from engine.answers import BASE
from spec_tools import compute_all

from hetero import launch
from hetero.prepare import prepare
from hetero.request import FinishReason, OutputDelta, Request
from hetero.sampling.params import SamplingParams
from hetero.settings import Settings
from hetero.text.grammar import GrammarCompiler
from hetero.text.tokenizer import Tokenizer

ON = dataclasses.replace(BASE, threads=1, kv_tokens=4096)
OFF = dataclasses.replace(ON, spec="off")
ROWS = [{"city": city, "mood": mood} for city, mood in (("Paris", "sunny"), ("Rome", "rainy"))]
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "mood": {"enum": ["sunny", "rainy"]}},
        "required": ["city", "mood"],
        "additionalProperties": False,
    },
    "minItems": 2,
    "maxItems": 2,
}
TOOL = {
    "type": "function",
    "function": {"name": "report", "parameters": {"properties": {"rows": SCHEMA}, "required": ["rows"]}},
}
# The prompts hold what the answers will be like, so that there is something to guess.
PROMPT = "These are the rows:\n" + json.dumps(ROWS) + "\nThe rows again, as JSON:\n"


@pytest.fixture(scope="module")
def compiler(smollm2_path) -> GrammarCompiler:
    return GrammarCompiler(Tokenizer(smollm2_path))


def texts(path: Path, settings: Settings, compiler: GrammarCompiler, together: bool) -> tuple[list[str], int]:
    """(greedy answers to a schema, a forced call, a choice and a free request, guesses that were right)."""
    settings = dataclasses.replace(settings, model=str(path), max_num_seqs=4)
    engine = launch.load(prepare(settings), settings, lambda *_: None)[0]._engine
    grammars = [
        compiler.compile({"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
        compiler.compile(None, tools=[TOOL], several=False),
        compiler.compile({"type": "choice", "choice": [json.dumps(ROWS), json.dumps(ROWS[:1])]}),
        None,
    ]
    out = ["" for _ in grammars]
    ends: dict[int, FinishReason | None] = {}
    try:
        if engine.speculation is not None:
            compute_all(engine.speculation)
        prompt = engine.tokenizer.encode(PROMPT, parse_special=False, add_special=True)
        for i, grammar in enumerate(grammars):

            def sink(delta: OutputDelta, i: int = i) -> None:
                out[i] += delta.text
                ends[i] = delta.finish_reason

            engine.add(
                Request(str(i), list(prompt), SamplingParams(max_tokens=110, temperature=0.0)), sink, grammar
            )
            while not together and engine.step():
                pass
        while engine.step():
            pass
        engine.check_invariants()
        assert all(ends[i] is FinishReason.STOP for i in range(3)), ends
        stats = engine.stats().speculation
        return out, 0 if stats is None else sum(map(sum, stats.accepted.values()))
    finally:
        engine.close()


def test_neither_guesses_nor_neighbours_change_it(smollm2_path, compiler):
    plain, _ = texts(smollm2_path, OFF, compiler, together=False)
    guessed, accepted = texts(smollm2_path, ON, compiler, together=True)
    assert plain == guessed
    assert accepted > 10, "hardly a guess was right"
    rows = json.loads(guessed[0])
    assert len(rows) == 2 and all(row.keys() == {"city", "mood"} for row in rows)
    assert guessed[1].startswith('<tool_call>\n{"name": "report"') and guessed[1].endswith("}\n</tool_call>")
    assert json.loads(guessed[2]) in (ROWS, ROWS[:1])
