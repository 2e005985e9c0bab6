"""What a whole engine answers to many prompts, greedy, in one configuration or another."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from hetero import launch
from hetero.prepare import prepare
from hetero.request import OutputDelta, Request
from hetero.sampling.params import SamplingParams
from hetero.settings import Settings
from hetero.text.tokenizer import Tokenizer

OUTPUT_TOKENS = 36  # more than two blocks: admission reserves one, so a small pool runs out
BASE = Settings(ctx=2048, kv_tokens=16384)
SOURCES = ("LICENSE", "README.md", "hetero/engine.py", "hetero/config.py", "backends/ggml/lib.py")


@dataclasses.dataclass
class Case:
    """A model, its prompts, and what it answers to each of them alone, from an empty cache."""

    path: Path
    prompts: list[list[int]]
    alone: list[list[int]]


def answers(
    path: Path,
    settings: Settings,
    prompts: list[list[int]],
    batch: int,
    *,
    rounds: int = 1,
    tokens: int = OUTPUT_TOKENS,
) -> tuple:
    """Greedy tokens of each prompt in the last round, and the engine's counters."""
    settings = dataclasses.replace(settings, model=str(path), max_num_seqs=batch)
    engine = launch.load(prepare(settings), settings, _ignore)[0]._engine
    try:
        for _ in range(rounds):
            out = _run(engine, prompts, batch, tokens)
        engine.check_invariants()
        stats = engine.stats()
        assert all(free == total for total, free in stats.kv_blocks), "blocks leaked"
        return out, stats
    finally:
        engine.write_behind(10)
        engine.close()


def _run(engine, prompts: list[list[int]], batch: int, tokens: int) -> list[list[int]]:
    """All prompts are queued, `batch` of them run. With a batch of 1 the cache is emptied between."""
    out: list[list[int]] = [[] for _ in prompts]
    ends: list[OutputDelta] = []
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts):

        def sink(delta: OutputDelta, i: int = i) -> None:
            out[i] += delta.token_ids
            if delta.finish_reason is not None:
                ends.append(delta)

        engine.add(Request(str(i), list(prompt), params), sink)
        if batch == 1:
            while engine.step():
                pass
            engine.scheduler.kv.clear_cache()
    while engine.step():
        pass
    assert [e.finish_reason for e in ends] == ["length"] * len(prompts)
    return out


def _ignore(*_: object) -> None:
    return


def make_prompts(path: Path, count: int, longest: int) -> list[list[int]]:
    """Prose, code and shared beginnings, from 1 to `longest` tokens."""
    rng, tokenizer = np.random.default_rng(5), Tokenizer(path)
    root = Path(__file__).parents[2]
    texts = [tokenizer.encode((root / s).read_text(), parse_special=False, add_special=True) for s in SOURCES]
    prompts = []
    for i in range(count):
        text = texts[i % len(texts)]
        length = int(np.exp(rng.uniform(0, np.log(longest))))
        start = 0 if i % 3 == 0 else int(rng.integers(0, len(text) - length))  # a third share their beginning
        prompts.append(text[start : start + length])
    return prompts
