"""Greedy text is the same alone and in company, in any chunks, from any cache, preempted or not."""

from __future__ import annotations

import dataclasses

import pytest
from engine.answers import BASE, OUTPUT_TOKENS, Case, answers, make_prompts
from scale import scaled


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def case(request, smollm2_path, gemma3_path) -> Case:
    path, count, longest = {
        "smollm2": (smollm2_path, scaled(40, 128), 400),
        "gemma3": (gemma3_path, scaled(18, 24), 1000),  # past the window of 512
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
    longest = max(len(case.prompts[i]) for i in short) + OUTPUT_TOKENS
    # No room for two. Guesses would end some answers before the pool does, as chance has it.
    settings = dataclasses.replace(BASE, kv_tokens=longest + 32, spec="off")
    out, stats = answers(case.path, settings, [case.prompts[i] for i in short], 32)
    assert out == [case.alone[i] for i in short]
    assert stats.preemptions > 0


def test_with_one_thread(case):
    prompts = case.prompts[:16]
    assert answers(case.path, dataclasses.replace(BASE, threads=1), prompts, 8)[0] == case.alone[:16]
