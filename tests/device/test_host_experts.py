"""Experts in main memory beside a device that has all else: the same logits, step after step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))
from driver import BLOCK, Driver
from family_tools import PlainStage
from tiny_experts import Sizes, tiny_experts

from backends.ggml.host_experts import host_layers
from backends.ggml.models import read_config
from backends.ggml.stage import StageSpec
from quant.gguf import open_gguf

# Of norms; what is left is that our kernels and ggml's sum in another order, and a half of the cache that
# falls to the other side. Few experts, so that this sends no token to another one.
BOUND = 1e-3
FEW = Sizes(experts=4, used=2)
LAYERS = 3


def stage_with(count: int) -> Any:
    """A stage class that keeps the experts of `count` layers in main memory."""

    class HostStage(PlainStage):
        def __init__(self, gguf: Any, config: Any, device: Any, spec: StageSpec, *rest: Any):
            super().__init__(gguf, config, device, replace(spec, host_experts=count, host_threads=1), *rest)

    return HostStage


@pytest.fixture(scope="module", params=["qwen2moe", "glm4moe", "gpt-oss", "gemma4"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_experts(tmp_path_factory.mktemp("host") / "m.gguf", request.param, sizes=FEW, seed=1)


@pytest.fixture
def pair(path: Path) -> Iterator[tuple[Driver, Driver]]:
    drivers = [Driver(path, max_tokens=128, threads=1, kind=stage_with(n)) for n in (0, LAYERS)]
    yield drivers[0], drivers[1]
    for driver in drivers:
        driver.close()


def close_to(got: np.ndarray, want: np.ndarray) -> bool:
    return bool(np.linalg.norm(got - want) <= BOUND * np.linalg.norm(want))


def test_logits_do_not_depend_on_where_experts_are(pair: tuple[Driver, Driver]):
    whole, apart = pair
    rng = np.random.default_rng(5)
    ids = rng.integers(3, 300, 100).tolist()
    for chunk in (100, 33):
        assert close_to(apart.logits(ids, chunk=chunk), whole.logits(ids, chunk=chunk))
    assert apart.stage._host_experts is not None
    apart.stage._host_experts.check_invariants()
    tables = np.split(rng.permutation(np.arange(1, 1 + 4 * 8)), 4)
    steps = [
        [(t, 0, ids[:n]) for t, n in zip(tables, (3, 17, 40, 64), strict=True)],
        [(t, n, ids[n : n + m]) for t, n, m in zip(tables, (3, 17, 40, 64), (1, 2, 30, 1), strict=True)],
    ]
    for step in steps:
        for got, expected in zip(apart.step(step), whole.step(step), strict=True):
            assert close_to(got, expected)
    assert BLOCK * 8 >= 70  # what the tables hold


def test_what_padding_holds_stays_finite(pair: tuple[Driver, Driver]):
    """Rows that only fill up a step are written to the cache's scratch block, which is read and masked."""
    _, apart = pair
    apart.stage._host_experts._layers.kv.expert_scratch[:] = 255  # NaNs
    ids = np.random.default_rng(6).integers(3, 300, 33).tolist()
    for chunk in (33, 5):
        assert np.isfinite(apart.logits(ids, chunk=chunk)).all()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=6))
def test_steps_of_any_size_in_any_order(pair: tuple[Driver, Driver], steps: list[tuple[int, int]]):
    """Graphs by layer and number of rows, in one buffer: each step gives what a stage without seams gives."""
    whole, apart = pair
    for seed, count in steps:
        ids = np.random.default_rng(seed).integers(3, 300, count).tolist()
        assert close_to(apart.logits(ids, chunk=count), whole.logits(ids, chunk=count))
        apart.stage._host_experts.check_invariants()


def test_weights_are_where_they_are_said_to_be(path: Path):
    sizes = []
    for count in range(LAYERS + 2):
        driver = Driver(path, threads=1, kind=stage_with(count))
        memory = driver.stage.memory()
        sizes.append((memory["weights"], memory["experts"]))
        driver.close()
    weights, experts = zip(*sizes, strict=True)
    dense = read_config(open_gguf(path)).mixture.first_layer
    moved = LAYERS - dense
    assert experts[0] == 0 and sorted(weights, reverse=True) == list(weights)
    assert len(set(weights)) == moved + 1  # more layers than there are change nothing
    assert all(more > less for less, more in pairwise(experts[: moved + 1]))


def test_which_layers_leave_their_experts(path: Path):
    config = read_config(open_gguf(path))
    dense = config.mixture.first_layer
    assert host_layers(config, 0, LAYERS, 0) == ()
    assert host_layers(config, 0, LAYERS, 1) == (dense,)
    assert host_layers(config, 2, LAYERS, LAYERS) == (2,)
    assert host_layers(config, 2, LAYERS, 1) == ()
