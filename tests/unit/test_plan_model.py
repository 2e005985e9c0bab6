"""From devices of known speed and memory to a plan, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from fake_stage import GIB, FakeDevices, cpu, gpu
from tiny_models import tiny_model

from backends.ggml.models.config import read_config
from hetero.commands import plan as command
from hetero.kv_types import KVTypes
from hetero.launch import _stage_specs
from hetero.models import ResolvedModel
from hetero.plan import calibrate as calibration
from hetero.plan.host_memory import plan_host
from hetero.plan.make import AGAIN, GUESSED, MISSING, PlanError, calibrate_model, plan_model
from hetero.prepare import Prepared
from hetero.settings import FolderLimit, Settings
from quant.gguf import open_gguf

LAYERS = 8


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(calibration, "ENOUGH", (1, 0.0))
    monkeypatch.setenv("HETERO_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "m.gguf", n_layers=LAYERS, n_ctx=8192)


class Planner:
    """Plans the model for devices whose slowness is known."""

    def __init__(self, path: Path):
        self.path, self.gguf = path, open_gguf(path)
        self.config = read_config(self.gguf)
        self.devices = FakeDevices(self.config)

    def plan(self, choices, measure=MISSING, **given):
        self.settings = Settings(max_num_seqs=given.pop("max_num_seqs", 16), **given)
        return plan_model(
            self.gguf,
            self.config,
            choices,
            self.settings,
            self.devices.open,
            lambda text, done: None,
            measure,
        )

    def prepared(self, choices, **given) -> Prepared:
        p = self.plan(choices, **given)
        model = ResolvedModel(self.path, "m")
        host = plan_host(0, p.facts, p.plan, choices, 1 << 40)
        return Prepared(model, self.gguf, self.config, tuple(choices), p.facts, p.plan, p.forecast, host)


@pytest.fixture
def planner(model_path: Path) -> Planner:
    return Planner(model_path)


def layers(planned) -> list[tuple[str, int]]:
    return [(s.device, s.layers[1] - s.layers[0]) for s in planned.plan.stages]


def test_a_single_device_is_not_measured(planner: Planner):
    planned = planner.plan([cpu("CPU")])
    assert layers(planned) == [("CPU", LAYERS)] and planned.forecast is None
    assert planner.devices.opened == []
    again = planner.plan([cpu("CPU")], measure=AGAIN)
    assert again.forecast.measured and again.plan.stages[0].seconds > 0
    assert planner.plan([cpu("CPU")]).forecast == again.forecast  # known by now
    assert planner.plan([cpu("CPU")], measure=GUESSED).forecast == again.forecast


def test_the_slow_device_gets_fewer_layers(planner: Planner):
    planner.devices.slowness["b"] = 3.0
    planned = planner.plan([cpu("a"), cpu("b", 1)], device=("a", "b"))
    (_, many), (_, few) = layers(planned)
    assert many + few == LAYERS and many > few
    first, last = (s.seconds for s in planned.plan.stages)
    view = planned.forecast
    cycle = max(first + last, 2 * max(first, last))
    assert view.tokens_per_second == pytest.approx(view.requests / cycle)
    assert view.stage_seconds == (first, last) and view.measured
    (even,) = [other for other in view.alternatives if other.name.startswith("even")]
    assert even.tokens_per_second < view.tokens_per_second
    assert even.layers == (("a", 4), ("b", 4))


def test_predicted_seconds_are_those_of_the_stages(planner: Planner):
    planner.devices.slowness["b"] = 2.0
    planned = planner.plan([cpu("a"), cpu("b", 1)], device=("a", "b"), split=(5, 3))
    view, fake = planned.forecast, planner.devices.opened[0][1]
    per_layer = 1e-3 + view.batch * (1e-4 + 1e-7 * view.context)
    assert fake.layer_seconds(0, np.full(view.batch, view.context)) == pytest.approx(per_layer)
    first, last = view.stage_seconds
    assert first == pytest.approx(5 * per_layer + view.batch * 2e-5, rel=0.05)
    assert last == pytest.approx(2 * (3 * per_layer + view.batch * 5e-3), rel=0.05)


def test_the_order_of_named_devices_is_kept_and_that_of_found_ones_is_free(planner: Planner):
    planner.devices.slowness |= {"CUDA0": 8.0}
    named = planner.plan([gpu("CUDA0"), gpu("CUDA1")], device=("CUDA0", "CUDA1"))
    assert [s.index for s in named.plan.stages] == [0, 1]
    found = planner.plan([gpu("CUDA0"), gpu("CUDA1")], objective="latency")
    assert [(s.index, s.layers) for s in found.plan.stages] == [(1, (0, LAYERS))]
    assert any("CUDA0 is left out" in note for note in found.plan.notes)
    order = planner.plan([gpu("CUDA0"), gpu("CUDA1")], objective="throughput")
    assert order.plan.stages[-1].index == 1  # the output head on the fast one


def test_memory_moves_layers(planner: Planner):
    """A card that is fast but small: what it lacks goes to the other one, and the cut says so."""
    planner.devices.slowness["CUDA0"] = 0.1
    small, large = gpu("CUDA0", free=32 << 20), gpu("CUDA1", free=8 * GIB)
    planned = planner.plan([small, large], device=("CUDA0", "CUDA1"), kv_tokens=16384)
    assert planned.plan.fits
    roomy = planner.plan([gpu("CUDA0"), large], device=("CUDA0", "CUDA1"), kv_tokens=16384)
    assert layers(planned)[0][1] < layers(roomy)[0][1]
    assert "CUDA0 lacks" in planned.plan.stages[0].reason and "another layer" in planned.plan.stages[0].reason


def test_capacity_asks_for_the_largest_cache(planner: Planner):
    planner.devices.slowness["CUDA1"] = 10.0
    choices = [gpu("CUDA0", free=24 << 20), gpu("CUDA1", free=20 << 20)]
    fast, large = (planner.plan(choices, objective=o, max_num_seqs=64) for o in ("latency", "capacity"))
    assert fast.plan.fits and large.plan.fits
    assert len(fast.plan.stages) == 1 and len(large.plan.stages) == 2
    assert large.plan.kv_tokens > fast.plan.kv_tokens


def test_what_does_not_fit_is_told_with_bytes_and_device(planner: Planner):
    prepared = planner.prepared(
        [gpu("CUDA0", free=8 << 20), gpu("CUDA1", free=GIB)], device=("CUDA0", "CUDA1"), kv_tokens=1 << 20
    )
    plan = prepared.plan
    assert not plan.fits
    for shortage in plan.shortages:
        (stage,) = [s for s in plan.stages if s.device in shortage.devices]
        assert shortage.nbytes == stage.total_bytes - int(stage.free_bytes * 0.9)


def test_devices_called_alike_are_told_apart(planner: Planner):
    planned = planner.plan([cpu("CPU:threads=1"), cpu("CPU:threads=1", 1)], device=("x", "y"))
    assert [name for name, _ in layers(planned)] == ["CPU:threads=1 #1", "CPU:threads=1 #2"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"split": (3, 5, 1)}, ["--split 3,5,1", "3 numbers", "2 devices"]),
        ({"split": (3, 4)}, ["--split 3,4", "7 layers", f"has {LAYERS}"]),
    ],
)
def test_a_split_that_is_none(planner: Planner, given, words):
    with pytest.raises(PlanError) as caught:
        planner.plan([cpu("a"), cpu("b", 1)], device=("a", "b"), **given)
    assert [w for w in words if w not in str(caught.value)] == []
    assert planner.devices.opened == []


def test_more_named_devices_than_layers(planner: Planner):
    many = [cpu(f"c{i}", i) for i in range(LAYERS + 1)]
    with pytest.raises(PlanError, match=f"--device: {LAYERS + 1} devices"):
        planner.plan(many, device=tuple("abcdefghi"))


def test_a_guess_is_called_a_guess(planner: Planner, capsys: pytest.CaptureFixture[str]):
    choices = [gpu("CUDA0"), cpu("CPU")]
    guessed = planner.prepared(choices, device=("CUDA0", "CPU"), measure=GUESSED)
    assert planner.devices.opened == [] and not guessed.forecast.measured
    assert layers(guessed)[0][1] > layers(guessed)[1][1]  # a card is taken to be faster
    assert any("guessed" in note for note in guessed.plan.notes)
    command._show(guessed)
    assert "nothing was measured" in capsys.readouterr().out


def test_what_the_command_shows(planner: Planner, capsys: pytest.CaptureFixture[str]):
    planner.devices.slowness["b"] = 3.0
    prepared = planner.prepared([cpu("a"), cpu("b", 1)], device=("a", "b"))
    command._show(prepared)
    out = capsys.readouterr().out
    for stage in prepared.plan.stages:
        (bar,) = [line for line in out.splitlines() if line.startswith(f"{stage.device}  [")]
        assert len(bar.split("[")[1].rstrip("]")) == command.BAR
        assert f"{1e3 * stage.seconds:.2f} ms" in out and stage.reason in out
    assert f"{prepared.forecast.tokens_per_second:.0f} tokens/s" in out
    assert "even, and by memory, split (a 4, b 4)" in out
    table = json.loads(json.dumps(command.as_table(prepared)))
    assert [s["layers"] for s in table["stages"]] == [list(s.layers) for s in prepared.plan.stages]
    assert table["forecast"]["tokens_per_second"] == asdict(prepared.forecast)["tokens_per_second"]
    assert sum(s["total_bytes"] for s in table["stages"]) == table["total_bytes"]


def test_calibration_serves_later_plans(planner: Planner):
    choices = [cpu("a"), cpu("b", 1)]
    settings = Settings()
    calibrate_model(
        planner.gguf, planner.config, choices, settings, planner.devices.open, lambda text, done: None
    )
    opened = len(planner.devices.opened)
    assert planner.plan(choices, device=("a", "b")).forecast.measured
    assert len(planner.devices.opened) == opened


FP8, Q8 = KVTypes("fp8", "fp8"), KVTypes("q8_0", "q8_0")


def test_formats_of_each_device_and_what_they_would_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    planner = Planner(tiny_model(tmp_path / "m.gguf", n_heads=4, n_kv_heads=2, head_dim=64, n_ctx=8192))
    choices, given = [cpu("CPU"), gpu("CUDA0")], {"device": ("CPU", "CUDA0"), "kv_tokens": 4096}
    plain, fp8 = (planner.prepared(choices, **given, kv_type=t) for t in (KVTypes(), FP8))
    assert [s.kv_types for s in plain.plan.stages] == [KVTypes(), KVTypes()]
    assert [s.kv_types for s in fp8.plan.stages] == [FP8, Q8]
    specs = {label: stage.spec for label, stage in planner.devices.opened}
    assert (specs["CPU"].key_type, specs["CUDA0"].value_type) == ("fp8", "q8_0")  # timed as they will be
    (first, last), dim = _stage_specs(fp8, planner.settings, 2), planner.config.head_dim_k
    assert (first.key_type, first.value_type, last.key_type, last.value_type) == (
        "fp8",
        "fp8",
        "q8_0",
        "q8_0",
    )
    held = {one.name: one.tokens for one in plain.plan.formats}
    assert held["f16"] == 4096
    assert held["fp8"] / 4096 == pytest.approx(2 * dim / (dim + dim / 16), rel=0.01)  # q8_0 on the card
    assert {one.name: one.tokens for one in fp8.plan.formats}["fp8"] == 4096
    command._show(fp8, FolderLimit("folder", 1 << 30))
    out = capsys.readouterr().out
    assert "disk cache folder:1.0 GiB: tokens " in out
    assert "KV format  fp8 and q8_0" in out and "4,096 as fp8" in out
    assert "note       CUDA0: no kernels for an fp8 KV cache" in out
    table = json.loads(json.dumps(command.as_table(fp8)))
    assert table["stages"][1]["kv_types"] == {"keys": "q8_0", "values": "q8_0"}
    disk = FolderLimit("folder", 1 << 30)
    on_disk = command.as_table(fp8, disk)["disk"]["formats"]
    block = sum(fp8.host.block_bytes)
    assert on_disk["fp8"] == 16 * ((1 << 30) // (4096 * (block // 4096 + 1)))
    assert 0.5 < on_disk["f16"] / on_disk["fp8"] < 0.65 and table["disk"] is None  # in whole pages
    in_ram = table["host"]["formats"]
    assert in_ram["fp8"] == table["host"]["tokens"] > 0
    assert in_ram["f16"] / in_ram["fp8"] == pytest.approx(67 / 128, rel=0.03)


def test_heads_that_a_format_cannot_hold(tmp_path: Path):
    planner = Planner(tiny_model(tmp_path / "m.gguf", n_embd=80, n_heads=2, head_dim=40))
    with pytest.raises(PlanError, match=r"--kv-type q8_0: .*multiple of 32 values, not 40 in the keys"):
        planner.plan([cpu("CPU")], kv_type=Q8)
    with pytest.raises(PlanError, match=r"--kv-type k=fp8,v=q8_0: .* in the values"):
        planner.plan([cpu("CPU")], kv_type=KVTypes("fp8", "q8_0"))
    plan = planner.plan([gpu("CUDA0")], kv_type=FP8).plan
    assert plan.stages[0].kv_types == KVTypes()
    assert any("--kv-type fp8 is f16" in note for note in plan.notes)
    assert [one.name for one in plan.formats] == ["f16", "fp8"]
