"""Calibration recovers the times of devices whose speed is known, and keeps them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_stage import EMBED, FIXED, HEAD, PER_ATTENDED, PER_TOKEN, FakeDevices, cpu, gpu
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model

from backends.ggml.devices import open_device
from backends.ggml.models.config import read_config
from backends.ggml.stage import GgmlStage
from hetero.kv_types import KVTypes
from hetero.plan import calibrate as module
from hetero.plan.calibrate import Subject, calibrate, rising
from hetero.plan.measured import cached_times, measured_times
from hetero.plan.split import Goal
from hetero.plan.times import DeviceTimes, costs, step_costs, times_from_json
from quant.gguf import open_gguf

WINDOW = 16
LAYERS = 8


def quiet(text: str, done: float) -> None:
    assert 0.0 <= done <= 1.0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "ENOUGH", (1, 0.0))


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("HETERO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "calibration"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "windows.gguf"
    return tiny_model(path, "gemma3", n_layers=LAYERS, sliding_window=WINDOW, sliding_window_pattern=3)


def subject_of(path: Path, devices: FakeDevices | None = None, chunk: int = 128) -> Subject:
    gguf = open_gguf(path)
    config = read_config(gguf)
    return Subject(gguf, config, chunk, (devices or FakeDevices(config)).open)


def test_known_times_are_recovered(model_path: Path):
    subject = subject_of(model_path)
    (times,) = calibrate(subject, [gpu("CUDA0")], quiet)
    windowed, full = 0, 1  # layers 2 and 5 of 8 have no window
    for tokens in (1, 3, 16, 64, 100):
        for context in (128, 700, 4096):
            plain = FIXED + tokens * (PER_TOKEN + PER_ATTENDED * context)
            narrow = FIXED + tokens * (3 * PER_TOKEN + PER_ATTENDED * WINDOW)
            assert times.layer(full, tokens, context) == pytest.approx(plain, rel=1e-6)
            assert times.layer(windowed, tokens, context) == pytest.approx(narrow, rel=1e-6)
        assert times.at("embed", tokens) == pytest.approx(tokens * EMBED, rel=1e-6)
        assert times.at("head", tokens) == pytest.approx(tokens * HEAD, rel=1e-6)
    triangle = 128 * 129 / 2
    assert times.prompt(full, 256) == pytest.approx(2 * (FIXED + 128 * PER_TOKEN + triangle * PER_ATTENDED))
    assert times.measured


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_small_models_have_ends_too(tmp_path: Path, layers: int):
    subject = subject_of(tiny_model(tmp_path / "small.gguf", n_layers=layers))
    (times,) = calibrate(subject, [gpu("CUDA0")], quiet)
    everything = layers * times.layer(0, 4, 128) + times.at("embed", 4) + times.at("head", 4)
    truth = layers * (FIXED + 4 * (PER_TOKEN + 128 * PER_ATTENDED)) + 4 * (EMBED + HEAD)
    assert everything == pytest.approx(truth, rel=0.1)


def test_every_device_has_its_own_times_and_all_stages_are_closed(model_path: Path):
    devices = FakeDevices(read_config(open_gguf(model_path)), {"slow": 3.0, "CUDA0": 0.1})
    choices = [cpu("fast"), gpu("CUDA0"), cpu("slow", 1)]
    fast, card, slow = calibrate(subject_of(model_path, devices), choices, quiet)
    assert slow.layer(0, 8, 512) == pytest.approx(3 * fast.layer(0, 8, 512))
    assert card.at("head", 8) == pytest.approx(0.1 * fast.at("head", 8))
    assert all(stage.closed for _, stage in devices.opened)
    order = [label for label, _ in devices.opened]
    assert {"fast", "slow"} == set(order[:2])  # CPU devices share memory, so they are timed together


def test_a_device_that_fails_stops_the_others(model_path: Path):
    devices = FakeDevices(read_config(open_gguf(model_path)))

    def opening(choice, spec):
        if choice.label == "broken":
            raise MemoryError("no room")
        return devices.open(choice, spec)

    subject = replace(subject_of(model_path), open_stage=opening)
    with pytest.raises(MemoryError, match="no room"):
        calibrate(subject, [cpu("fine"), cpu("broken", 1)], quiet)
    assert all(stage.closed for _, stage in devices.opened)


def test_real_stages_can_be_timed_side_by_side(tmp_path: Path):
    """Two one-thread CPU devices, all stages that a calibration opens."""
    path = tiny_model(tmp_path / "real.gguf", n_layers=4, n_ctx=8192)
    gguf = open_gguf(path)
    config = read_config(gguf)

    def opening(choice, spec):
        return GgmlStage(gguf, config, open_device("CPU", choice.threads), spec)

    first, second = calibrate(Subject(gguf, config, 64, opening), [cpu("a"), cpu("b", 1)], quiet)
    for times in (first, second):
        assert times.layer(0, 1, 128) > 0 and times.prompt(0, 64) > 0
        assert times.layer(0, 16, 4096) > times.layer(0, 1, 128)


def test_times_are_kept_and_told_apart(model_path: Path, cache: Path):
    devices = FakeDevices(read_config(open_gguf(model_path)))
    subject, choices = subject_of(model_path, devices), [cpu("a"), cpu("b", 1), gpu("CUDA0")]
    assert cached_times(subject, choices) == (None, None, None)
    first = measured_times(subject, choices, quiet)
    opened = len(devices.opened)
    assert measured_times(subject, choices, quiet) == first == cached_times(subject, choices)
    assert len(devices.opened) == opened
    assert cached_times(subject, [gpu("CUDA1")]) == (None,)
    assert cached_times(subject, [cpu("a")]) == (None,)  # alone it has the memory to itself
    assert cached_times(replace(subject, chunk_tokens=64), [gpu("CUDA0")]) == (None,)
    for kept in (KVTypes("fp8", "fp8"), KVTypes("q8_0", "f16")):
        assert cached_times(replace(subject, kv_types=kept), choices)[:2] == (None, None)
    measured_times(subject, [gpu("CUDA0"), gpu("CUDA1")], quiet)
    assert {label for label, _ in devices.opened[opened:]} == {"CUDA1"}
    measured_times(subject, [gpu("CUDA0")], quiet, again=True)
    assert devices.opened[-1][0] == "CUDA0"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:100],
        lambda text: "[]",
        lambda text: "{}",
        lambda text: text.replace('"chunk_tokens": 128', '"chunk_tokens": 0'),
        lambda text: json.dumps(json.loads(text) | {"head": [1.0]}),
        lambda text: json.dumps(json.loads(text) | {"head": [float("nan")] * 6}),
        lambda text: json.dumps(json.loads(text) | {"tokens": [2, 1, 4, 8, 16, 64]}),
    ],
)
def test_a_damaged_file_is_as_good_as_none(model_path: Path, cache: Path, damage):
    subject = subject_of(model_path)
    measured_times(subject, [gpu("CUDA0")], quiet)
    (file,) = cache.iterdir()
    file.write_text(damage(file.read_text()))
    assert cached_times(subject, [gpu("CUDA0")]) == (None,)


def test_a_cache_that_cannot_be_written_breaks_nothing(model_path: Path, cache: Path):
    cache.parent.write_text("not a folder")
    assert measured_times(subject_of(model_path), [gpu("CUDA0")], quiet)[0].measured


@given(st.lists(st.floats(0, 1e3), max_size=8))
def test_rising_is_the_closest_row_that_does_not_fall(values: list[float]):
    found = rising(values)
    assert len(found) == len(values)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(found))
    assert sum(found) == pytest.approx(sum(values))
    distance = sum((a - b) ** 2 for a, b in zip(values, found, strict=True))
    for other in (sorted(values), np.maximum.accumulate(values or [0.0])[: len(values)]):
        assert distance <= sum((a - b) ** 2 for a, b in zip(values, other, strict=True)) + 1e-6


TIMES = DeviceTimes(
    tokens=(1, 4),
    contexts=(100, 200),
    decode=(((1.0, 2.0), (4.0, 8.0)), ((10.0, 10.0), (10.0, 10.0))),
    chunk_tokens=10,
    chunk=(20.0, 30.0),
    embed=(0.1, 0.4),
    head=(2.0, 8.0),
    enter=(0.01, 0.04),
    leave=(0.02, 0.02),
)


def test_costs_of_a_step():
    assert times_from_json(json.loads(json.dumps(TIMES.as_json()))) == TIMES
    found = costs([TIMES], [0, 1, 0], batch=2, context=150, prompt_share=0.5)
    layer = 1.5 + (6.0 - 1.5) / 3  # between the grid's points
    assert found.layers == pytest.approx(np.array([[layer + 2.0, 10.0 + 3.0, layer + 2.0]]))
    assert (found.first[0], found.last[0]) == pytest.approx((0.3, 4.0))
    assert (found.enter[0], found.leave[0]) == pytest.approx((0.03, 0.02))
    halves = [step_costs([TIMES], [0], Goal("throughput", 8), stages, 100).last[0] for stages in (1, 2)]
    assert halves == pytest.approx([16.0, 8.0])
