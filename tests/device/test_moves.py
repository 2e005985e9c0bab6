"""Blocks spilled to host memory and loaded again: in this process, in another one, on a worker."""

from __future__ import annotations

import pytest
from moves_tools import SLOTS, spec_of, there_and_back
from test_plain_operators import PlainStage
from tiny_models import tiny_model
from worker_tools import Model

from backends.base import DeviceSpec, StageBackend
from backends.ggml.devices import Device, open_device
from backends.ggml.stage import GgmlStage
from hetero.pipeline.isolated import IsolatedStage

ONE_THREAD = DeviceSpec("CPU", threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Four layers, two KV groups: with a window and without."""
    folder = tmp_path_factory.mktemp("moves")
    shape = {"n_layers": 4, "sliding_window": 24, "sliding_window_pattern": 2}
    return Model(tiny_model(folder / "tiny.gguf", arch="gemma3", **shape), max_tokens=128)


def device(asynchronous: bool = False) -> Device:
    found = open_device(ONE_THREAD)
    found.asynchronous = asynchronous
    return found


def ours(model: Model, first: int = 0, last: int | None = None) -> StageBackend:
    return GgmlStage(model.gguf, model.config, device(), spec_of(model, first, last))


def plain(model: Model, first: int = 0, last: int | None = None) -> StageBackend:
    return PlainStage(model.gguf, model.config, device(), spec_of(model, first, last))


def threaded(model: Model, first: int = 0, last: int | None = None) -> StageBackend:
    """Loads in a thread, as on a device that copies while it computes."""
    return PlainStage(model.gguf, model.config, device(True), spec_of(model, first, last))


def isolated(model: Model, first: int = 0, last: int | None = None) -> StageBackend:
    return IsolatedStage(model.path, model.config, ONE_THREAD, spec_of(model, first, last))


KINDS = {"our kernels": ours, "plain operators": plain, "in a thread": threaded}


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(model: Model, kind: str) -> None:
    stage = KINDS[kind](model)
    assert stage.memory()["host"] >= SLOTS * stage.host_memory.slot_bytes(0) > 0
    there_and_back(model, [stage])
    stage.host_memory.check_invariants()
    stage.close()


def test_through_two_stages_of_which_one_is_in_a_process_of_its_own(model: Model) -> None:
    stages = [ours(model, 0, 1), isolated(model, 1)]
    sizes = [[stage.host_memory.slot_bytes(g) > 0 for g in range(2)] for stage in stages]
    assert sizes == [[True, False], [True, True]]
    there_and_back(model, stages)
    for stage in stages:
        stage.close()
