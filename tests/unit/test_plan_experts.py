"""Which layers' experts stay in main memory, and what the plan says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_experts import LAYERS, Sizes, tiny_experts
from tiny_models import tiny_model

from backends.base import DeviceInfo, DeviceSpec
from backends.ggml.layers import DeviceLayers
from backends.ggml.models import read_config
from backends.ggml.stage import GgmlStage, StageSpec
from hetero.launch import open_stages
from hetero.plan import experts, make
from hetero.plan.devices import DeviceChoice
from hetero.plan.experts import fewest
from hetero.plan.facts import layer_classes
from hetero.plan.make import GUESSED, PlanError, Planned, plan_model
from hetero.plan.sizes import MIN_CONTEXT
from hetero.prepare import prepare
from hetero.settings import Settings
from quant.gguf import open_gguf

MIB = 1 << 20
SIZES = Sizes(layers=6, width=512, experts=16)  # 6 MiB of experts in each layer
DENSE, WITH_EXPERTS = 1, 5


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_experts(tmp_path_factory.mktemp("plan") / "m.gguf", "glm4moe", sizes=SIZES)


def card(nbytes: int, name: str = "CUDA0", **spec: Any) -> DeviceChoice:
    info = DeviceInfo(name, "gpu", "a card", nbytes, nbytes, f"id of {name}", "CUDA")
    return DeviceChoice(info, DeviceSpec(name, **spec), name)


def plan(path: Path, choices: list[DeviceChoice], **settings: Any) -> Planned:
    def never(*_: Any) -> Any:
        raise AssertionError("nothing is measured")

    gguf = open_gguf(path)
    wanted = Settings(model=str(path), ctx=256, kv_tokens=256, max_num_seqs=2, **settings)
    return plan_model(gguf, read_config(gguf), choices, wanted, never, lambda *_: None, GUESSED)


@pytest.mark.parametrize("cards", [1, 2])
def test_as_few_as_have_to(path: Path, cards: int):
    def on(nbytes: int) -> Planned:
        return plan(path, [card(nbytes, f"CUDA{i}") for i in range(cards)])

    counts = []
    for nbytes in range(MIB, 80 * MIB, 2 * MIB // cards):
        made = on(nbytes).plan
        counts.append(made.host_experts if made.fits else WITH_EXPERTS + 1)
        said = [reason for reason in made.reasons if "in main memory" in reason]
        assert len(said) == (made.host_experts > 0) and (made.host_bytes > 0) == (made.host_experts > 0)
    assert counts == sorted(counts, reverse=True)
    assert set(counts) == set(range(WITH_EXPERTS + 2))  # from nothing fits to all is on the cards


def test_experts_are_in_one_memory_only(path: Path):
    whole, apart = plan(path, [card(200 * MIB)]), plan(path, [card(200 * MIB)], cpu_moe=2)
    assert whole.plan.host_experts == 0 and apart.plan.host_experts == 2
    assert "experts of 2 layers in main memory (12.4 MiB): --cpu-moe 2" in apart.plan.reasons
    (stage,), (left,) = whole.plan.stages, apart.plan.stages
    moved = stage.weight_bytes - left.weight_bytes
    assert abs(moved - apart.plan.host_bytes) <= 2 and moved > 12 * MIB
    assert whole.facts.weight_bytes == pytest.approx(apart.facts.weight_bytes, abs=8)
    assert apart.plan.total_bytes == pytest.approx(whole.plan.total_bytes, abs=8)


def test_layers_are_of_another_class_where_their_experts_are_elsewhere(path: Path):
    gguf = open_gguf(path)
    config = read_config(gguf)
    assert layer_classes(gguf, config) == (0, 1, 1, 1, 1, 1)
    assert layer_classes(gguf, config, 2) == (0, 1, 1, 2, 2, 2)


def test_stages_are_timed_with_their_experts_where_they_will_be(path: Path):
    gguf, opened = open_gguf(path), []
    settings = Settings(model=str(path), cpu_moe=2, threads=3)
    subject = make._subject(gguf, read_config(gguf), settings, lambda choice, spec: opened.append(spec), 2)
    subject.open_stage(card(MIB), StageSpec(0, 2, {0: 0, 1: 0}, (4,), 16, 16))
    ((spec),) = opened
    assert (spec.host_experts, spec.host_threads, spec.last) == (2, 3, 2)
    assert subject.classes == (0, 1, 1, 2, 2, 2)


def test_main_memory_has_to_have_room(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(experts, "free_memory", lambda: 10 * MIB)
    with pytest.raises(
        PlanError, match=r"--cpu-moe 2: these experts take 12.4 MiB of main memory, of which 9.0"
    ):
        plan(path, [card(200 * MIB)], cpu_moe=2)
    made = plan(path, [card(25 * MIB)])
    assert not made.plan.fits and made.plan.host_experts == 0


REFUSED = {
    "more layers": ([card(MIB)], 6, "this model has experts in 5 layers"),
    "a worker": ([card(MIB, worker="box:1234")], 1, "is on another machine"),
    "a CPU": (
        [DeviceChoice(DeviceInfo("CPU", "cpu", "", MIB, MIB, "CPU", "CPU"), DeviceSpec("CPU"), "CPU")],
        1,
        "name another --device",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(path: Path, name: str):
    choices, count, message = REFUSED[name]
    with pytest.raises(PlanError, match=rf"--cpu-moe {count}: .*{message}"):
        plan(path, choices, cpu_moe=count)


def test_a_model_without_experts(tmp_path: Path):
    path = tiny_model(tmp_path / "m.gguf")
    with pytest.raises(PlanError, match="--cpu-moe 1: this model has no experts"):
        plan(path, [card(MIB)], cpu_moe=1)
    assert plan(path, [card(MIB)]).plan.host_experts == 0


@given(needed=st.integers(0, 8))
def test_the_fewest_are_found_in_few_tries(path: Path, needed: int):
    config, tries = read_config(open_gguf(path)), []

    def fits(count: int) -> bool:
        tries.append(count)
        return count >= needed

    assert fewest(config, [card(MIB)], fits) == (needed if needed <= WITH_EXPERTS else 0)
    assert len(tries) <= 5


@pytest.mark.parametrize("arch", LAYERS)
def test_the_plan_bounds_what_families_take(tmp_path: Path, arch: str):
    sizes = Sizes(layers=2, embd=256, heads=8, head_dim=32, width=256, dense=512, experts=16, used=4)
    path = tiny_experts(tmp_path / "m.gguf", arch, sizes=sizes, weight_type="Q8_0")
    settings = Settings(model=str(path), kv_tokens=1024, threads=1, max_num_seqs=4)
    prepared = prepare(settings)
    (planned,), (stage,) = prepared.plan.stages, open_stages(prepared, settings, lambda text, done: None)
    held = stage.memory()
    stage.close()
    assert 0.9 * planned.weight_bytes < held["weights"] <= planned.weight_bytes
    assert held["compute"] <= planned.compute_bytes and held["experts"] == 0


def test_the_plan_bounds_what_a_stage_takes(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(GgmlStage, "_kind", lambda self: DeviceLayers)
    monkeypatch.setattr(DeviceChoice, "own_kernels", False)
    settings = Settings(
        model=str(path), kv_tokens=MIN_CONTEXT, threads=1, max_num_seqs=2, cpu_moe=2, isolate="off"
    )
    prepared = prepare(settings)
    (planned,), (stage,) = prepared.plan.stages, open_stages(prepared, settings, lambda text, done: None)
    held = stage.memory()
    stage.close()
    assert 0.9 * planned.weight_bytes < held["weights"] <= planned.weight_bytes
    assert held["compute"] <= planned.compute_bytes
    assert (
        0.9 * prepared.plan.host_bytes < held["experts"] <= prepared.plan.host_bytes + planned.compute_bytes
    )
