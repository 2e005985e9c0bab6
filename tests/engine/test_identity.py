"""Greedy text is the same alone and in company, in any chunks, from any cache, preempted or not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from hetero import launch
from hetero.config import Settings
from hetero.request import OutputDelta, Request
from hetero.sampling.params import SamplingParams
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
    path: Path, settings: Settings, prompts: list[list[int]], batch: int, *, rounds: int = 1
) -> tuple:
    """Greedy tokens of each prompt in the last round, and the engine's counters."""
    settings = dataclasses.replace(settings, model=str(path), max_num_seqs=batch)
    engine = launch.load(launch.prepare(settings), settings, _ignore)[0]._engine
    try:
        for _ in range(rounds):
            out = _run(engine, prompts, batch)
        engine.check_invariants()
        stats = engine.stats()
        assert all(free == total for total, free in stats.kv_blocks), "blocks leaked"
        return out, stats
    finally:
        engine.runner.close()


def _run(engine, prompts: list[list[int]], batch: int) -> list[list[int]]:
    """All prompts are queued, `batch` of them run. With a batch of 1 the cache is emptied between."""
    out: list[list[int]] = [[] for _ in prompts]
    ends: list[OutputDelta] = []
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
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


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def case(request, smollm2_path, gemma3_path) -> Case:
    path, count, longest = {
        "smollm2": (smollm2_path, 128, 400),
        "gemma3": (gemma3_path, 24, 1000),  # past the window of 512
    }[request.param]
    prompts = make_prompts(path, count, longest)
    alone, _ = answers(path, BASE, prompts, 1)
    assert len({tuple(a) for a in alone}) > count / 2  # they really differ
    return Case(path, prompts, alone)


@pytest.mark.parametrize("batch", [8, 32])
@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_in_company(case, batch, chunk):
    settings = dataclasses.replace(BASE, max_num_batched_tokens=chunk)
    assert answers(case.path, settings, case.prompts, batch)[0] == case.alone


def test_from_a_warm_cache(case):
    out, stats = answers(case.path, BASE, case.prompts, 8, rounds=2)
    assert out == case.alone
    assert stats.cached_tokens > sum(map(len, case.prompts)) // 2


def test_with_preemption(case):
    short = [i for i, p in enumerate(case.prompts) if len(p) <= 100]
    settings = dataclasses.replace(BASE, kv_tokens=192)
    out, stats = answers(case.path, settings, [case.prompts[i] for i in short], 32)
    assert out == [case.alone[i] for i in short]
    assert stats.preemptions > 0


def test_with_one_thread(case):
    prompts = case.prompts[:16]
    assert answers(case.path, dataclasses.replace(BASE, threads=1), prompts, 8)[0] == case.alone[:16]
