"""A Vulkan device, alone and beside the CPU, answers as the CPU does.

The devices add up in another order, so that a token may differ where the CPU's two best logits are as
good as equal; from there on the texts go their own ways.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device import vulkan
from engine.answers import BASE, answers
from engine.driver import Driver
from scale import FULL, scaled
from tiny_experts import Sizes, tiny_experts
from tiny_hybrid import tiny_hybrid
from tiny_models import tiny_model

from hetero.kv_types import KVTypes

NEAR_TIE = 1e-3  # of the largest logit
Q8_NEAR_TIE = 1e-2  # a sum of another order is another code, if it is between two
PROMPTS, TOKENS = scaled(12, 32), scaled(6, 16)
FEW = scaled(4, 12)  # where there is more to compute
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama", "n_layers": 4},
    "windows": {"arch": "gemma3", "n_layers": 4, "sliding_window": 32, "sliding_window_pattern": 2},
    "blocks": {"arch": "llama", "n_layers": 2, "head_dim": 32},
}
DEVICES = {
    "alone": {"device": ["Vulkan0"]},
    "before the CPU": {"device": ["Vulkan0", "CPU:threads=1"], "split": [2, 2]},
    "behind the CPU": {"device": ["CPU:threads=1", "Vulkan0"], "split": [1, 3], "isolate": "off"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vulkan")
    return {name: tiny_model(folder / f"{name}.gguf", seed=3, **MODELS[name]) for name in MODELS}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(3, 300, int(np.exp(rng.uniform(0, 5)))).tolist() for _ in range(PROMPTS)]


def run(model: Path, settings: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    script = str(Path(__file__).with_name("run_answers.py"))
    # all at once: each step is a thousand little programs for the software driver
    command = [sys.executable, script, str(model), json.dumps(settings), json.dumps(prompts)]
    command += [str(PROMPTS), str(TOKENS)]
    done = subprocess.run(command, env=vulkan.environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def near_ties(
    model: Path,
    prompts: list[list[int]],
    got: list[list[int]],
    want: list[list[int]],
    kept: str = "f16",
    tie: float = NEAR_TIE,
) -> list[tuple[int, int]]:
    """(prompt, position) of every answer's first other token; fails where the CPU was sure."""
    driver = Driver(model, kv_types=(kept, kept))
    found = []
    for i, (prompt, ours, theirs) in enumerate(zip(prompts, got, want, strict=True)):
        assert len(ours) == len(theirs)
        at = next((j for j, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if at is None:
            continue
        logits = driver.logits([*prompt, *theirs[:at]])[-1]
        second, best = np.sort(logits)[-2:]
        assert best - second <= tie * np.abs(logits).max(), f"prompt {i} differs at token {at}"
        found.append((i, at))
    driver.close()
    return found


@pytest.mark.parametrize(
    ("name", "where"),
    [("llama", "alone"), ("llama", "before the CPU"), ("windows", "behind the CPU"), ("windows", "alone")],
)
def test_greedy_text(models: dict[str, Path], prompts: list[list[int]], name: str, where: str) -> None:
    model = models[name]
    if name == "windows":  # two KV groups, and four times as slow here
        prompts = prompts[:FEW]
    got = run(model, DEVICES[where], prompts)
    want, _ = answers(model, BASE, prompts, PROMPTS, tokens=TOKENS)
    ties = near_ties(model, prompts, got["answers"], want)
    print(f"{len(ties)} of {len(prompts)} answers differ, from a near tie on")
    assert len(ties) <= len(prompts) // 4


def test_experts_in_main_memory(tmp_path: Path, prompts: list[list[int]]) -> None:
    """Each step leaves the device for them, in a child process, and comes back."""
    model = tiny_experts(tmp_path / "m.gguf", "gpt-oss", sizes=Sizes(layers=2, experts=4, used=2))
    few = prompts[: scaled(2, 6)]
    got = run(model, {"device": ["Vulkan0"], "cpu_moe": 1}, few)
    want, _ = answers(model, BASE, few, PROMPTS, tokens=TOKENS)
    ties = near_ties(model, few, got["answers"], want)
    assert len(ties) <= len(few) // 2


@pytest.mark.skipif(not FULL, reason="minutes of compilation; HETERO_TEST_SCALE=full")
def test_recurrent_layers(tmp_path: Path, prompts: list[list[int]]) -> None:
    """Gated delta nets by the driver's operators, states beside keys and values."""
    model = tiny_hybrid(tmp_path / "m.gguf", every=2, head_dim=32, state_dim=64, key_heads=1, value_heads=2)
    few = prompts[:FEW]
    got = run(model, {"device": ["Vulkan0"]}, few)
    want, _ = answers(model, BASE, few, PROMPTS, tokens=TOKENS)
    assert len(near_ties(model, few, got["answers"], want)) <= len(few) // 4


def test_q8_0_in_place_of_fp8(models: dict[str, Path], prompts: list[list[int]]) -> None:
    """What the CPU answers with its own kernels for q8_0."""
    few = prompts[:FEW]
    got = run(models["blocks"], {"device": ["Vulkan0"], "kv_type": "fp8", "isolate": "off"}, few)
    settings = replace(BASE, kv_type=KVTypes("q8_0", "q8_0"))
    want, _ = answers(models["blocks"], settings, few, PROMPTS, tokens=TOKENS)
    ties = near_ties(models["blocks"], few, got["answers"], want, "q8_0", Q8_NEAR_TIE)
    assert len(ties) <= max(2, FEW // 3)


def test_blocks_come_back_from_host_memory(models: dict[str, Path]) -> None:
    """Through a second stream of work, while a step computes, to and from memory that the device reaches."""
    script = str(Path(__file__).with_name("run_moves.py"))
    command = [sys.executable, script, str(models["windows"]), "Vulkan0"]
    done = subprocess.run(command, env=vulkan.environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["asynchronous"] and facts["pinned"] == 2 and facts["same"] == facts["bytes"] > 0


def test_one_user_is_attended_in_place(models: dict[str, Path]) -> None:
    counted = run(models["llama"], {"device": ["Vulkan0"]}, [[5, 6, 7] * 20])["counters"]
    assert counted[0]["attended_in_place"] > 0 and counted[0]["attended_gathered"] == 0
