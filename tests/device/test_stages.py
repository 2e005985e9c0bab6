"""The same greedy text through any cut, any number of stages, any depth, and any kind of stage."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from engine.answers import BASE, Case, answers, make_prompts
from scale import scaled

from hetero.plan import devices
from hetero.settings import Settings

PROMPTS, LONGEST = scaled(32, 64), 400


@pytest.fixture(scope="module")
def case(smollm2_path: Path) -> Case:
    prompts = make_prompts(smollm2_path, PROMPTS, LONGEST)
    return Case(smollm2_path, prompts, answers(smollm2_path, BASE, prompts, 1)[0])


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three devices of one thread each on any machine, not pinned."""
    around = devices.Around(cores=lambda: (), usable_cores=lambda: 8)
    monkeypatch.setattr(devices, "Around", lambda: around)


def staged(*layers: int, **changes: object) -> Settings:
    return dataclasses.replace(
        BASE,
        device=("CPU:threads=1",) * len(layers),
        split=layers,
        **changes,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("layers", [(17, 13), (11, 10, 9), (1, 28, 1)], ids=str)
def test_stages(case: Case, layers: tuple[int, ...]) -> None:
    settings = staged(*layers, max_num_batched_tokens=128)
    assert answers(case.path, settings, case.prompts, 16)[0] == case.alone


@pytest.mark.parametrize("depth", [1, 3])
def test_other_depths_than_stages(case: Case, depth: int) -> None:
    settings = staged(16, 14, pipeline_depth=depth, max_num_batched_tokens=64)
    assert answers(case.path, settings, case.prompts[:24], 8)[0] == case.alone[:24]


def test_with_preemption_and_a_warm_cache(case: Case) -> None:
    short = [i for i, p in enumerate(case.prompts) if len(p) <= 100]
    settings = staged(16, 14, kv_tokens=192)
    out, stats = answers(case.path, settings, [case.prompts[i] for i in short], 16, rounds=2)
    assert out == [case.alone[i] for i in short]
    assert stats.preemptions > 0 and stats.cached_tokens > 0


def test_in_processes_of_their_own(case: Case) -> None:
    settings = staged(18, 12, isolate="all")
    assert answers(case.path, settings, case.prompts[:16], 8)[0] == case.alone[:16]


def test_sliding_windows_over_two_stages(gemma3_path: Path) -> None:
    prompts = make_prompts(gemma3_path, 8, 1000)
    alone = answers(gemma3_path, BASE, prompts, 1)[0]
    assert answers(gemma3_path, staged(10, 8), prompts, 8)[0] == alone


def test_numbers_that_do_not_add_up_are_named(case: Case) -> None:
    with pytest.raises(Exception, match=re.escape("--split 20,12: these are 32 layers, the model has 30")):
        answers(case.path, staged(20, 12), [], 1)
