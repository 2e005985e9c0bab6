"""Models whose last layers attend keys and values of earlier ones: one pool for all, and on one device."""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from driver import Driver
from engine import answers as served
from engine.answers import BASE, answers
from fake_stage import cpu
from family_tools import BOUND, PlainStage, relative
from gguf_tools import Raw, rewrite
from test_families import VARIANTS
from test_family_stages import IDS, one_sequence
from tiny_families import tiny_family
from tiny_models import libllama_logits, random_tensor

from backends.ggml.devices import open_device
from backends.ggml.models import read_config
from backends.ggml.stage import GgmlStage
from backends.host_memory import slot_sizes
from hetero.kv.costs import MoveCosts
from hetero.kv_types import F16
from hetero.pipeline.part import ModelPart
from hetero.plan.calibrate import Subject, _stages
from hetero.plan.facts import layer_classes, model_facts
from hetero.plan.make import GUESSED, PlanError, check_counts
from hetero.plan.planner import Limits
from hetero.plan.probe import Probe
from hetero.prepare import LaunchError, prepare
from quant.gguf import open_gguf

LAYERS, OWN, LAST_CUT = 6, 3, 1
OUTPUT = 12
SETTINGS = dataclasses.replace(BASE, ctx=400, kv_tokens=4096, spec="off", threads=1, isolate="off")
TWO = {"device": ("CPU:threads=1", "CPU:threads=1"), "split": (LAST_CUT, LAYERS - LAST_CUT)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With inputs for each layer, too."""
    variant = VARIANTS["gemma4 inputs"]
    path = tmp_path_factory.mktemp("shared") / "m.gguf"
    return tiny_family(path, variant.arch, variant.metadata, **variant.options)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 300, length).tolist() for length in (90, 41, 70, 12, 88, 33, 64, 80)]


@pytest.fixture(autouse=True)
def guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "prepare", functools.partial(prepare, measure=GUESSED))


@pytest.fixture(scope="module")
def alone(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    return answers(path, SETTINGS, prompts, 1, tokens=OUTPUT)[0]


@pytest.mark.parametrize("devices", [{}, TWO], ids=["one", "two"])
def test_text_in_company_in_stages_and_from_main_memory(
    path, prompts, alone, devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Blocks are loaded whatever that was measured to cost: a tiny model is as quickly computed again."""
    monkeypatch.setattr(MoveCosts, "gain", lambda costs, tokens, nbytes: float(tokens))
    monkeypatch.setattr(MoveCosts, "load_budget", 1 << 30)
    small = {"kv_tokens": 272, "ctx": 256, "ram_cache": 1 << 24, "max_num_batched_tokens": 50}
    settings = dataclasses.replace(SETTINGS, **small, **devices)
    out, stats = answers(path, settings, prompts, 4, rounds=2, tokens=OUTPUT)
    assert out == alone
    assert stats.tokens_from["host"] > 0 and len(stats.stages) == len(devices or "1")


def test_text_with_fp8_keys(path, prompts):
    """In company and alone: all layers that share a pool read the same format."""
    settings = dataclasses.replace(SETTINGS, kv_type=dataclasses.replace(F16, keys="fp8", values="fp8"))
    one, _ = answers(path, settings, prompts, 1, tokens=OUTPUT)
    assert answers(path, dataclasses.replace(settings, **TWO), prompts, 4, tokens=OUTPUT)[0] == one


@pytest.mark.parametrize("kind", [GgmlStage, PlainStage])
def test_layers_without_pools_take_no_memory(path: Path, kind: type[GgmlStage]):
    driver = Driver(path, num_blocks=8, max_tokens=64, threads=1, kind=kind)
    sizes = slot_sizes(driver.config, driver.stage.spec)
    for group, size in enumerate(sizes):
        parts = driver.stage._layers.kv.parts(group)
        assert sum(nbytes for _, nbytes in parts) == size > 0
    assert sum(len(driver.stage._layers.kv.parts(g)) for g in range(len(sizes))) == 2 * OWN
    driver.close()


@pytest.mark.parametrize("kind", [GgmlStage, PlainStage])
def test_a_stage_of_what_another_machine_is_sent(path: Path, tmp_path: Path, kind: type[GgmlStage]):
    """It looks up its own rows of the embeddings."""
    driver = Driver(path, num_blocks=8, max_tokens=64, threads=1, kind=kind)
    batch, rows = one_sequence(driver.num_groups, len(IDS)), None
    for first, last in ((0, LAST_CUT), (LAST_CUT, LAYERS)):
        part = tmp_path / f"{first}.gguf"
        chunks = ModelPart(driver.gguf, driver.config, first, last).chunks()
        part.write_bytes(b"".join(chunk.tobytes() for chunk in chunks))
        gguf = open_gguf(part)
        spec = dataclasses.replace(driver.stage.spec, first=first, last=last)
        stage = kind(gguf, read_config(gguf, (first, last)), open_device("CPU", 1), spec)
        stage.prepare(batch, rows)
        rows = stage.compute().copy()
        stage.close()
    np.testing.assert_allclose(rows, driver.logits(IDS, chunk=len(IDS)), rtol=1e-4, atol=1e-4)
    driver.close()


@pytest.mark.parametrize("type_name", ["BF16", "Q4_0", "Q8_0", "IQ4_NL"])
def test_embeddings_for_each_layer_of_any_type(path: Path, tmp_path: Path, type_name: str):
    """Unpacked as by libllama."""
    name = "per_layer_token_embd.weight"
    shape = open_gguf(path).tensors[name].shape[::-1]
    table = random_tensor(np.random.default_rng(1), shape, type_name, 0.1)
    assert isinstance(table, Raw)
    changed = rewrite(path, tmp_path / "m.gguf", {}, {name: table})
    driver = Driver(changed, max_tokens=64, threads=1)
    got, want = driver.logits(IDS, chunk=len(IDS)), libllama_logits(changed, IDS)
    driver.close()
    assert relative(got, want) <= BOUND


@pytest.mark.parametrize("kind", [GgmlStage, PlainStage])
def test_every_stage_that_is_timed_can_be_opened(path: Path, kind: type[GgmlStage]):
    """Also one of layers that share what a layer elsewhere makes."""
    gguf = open_gguf(path)
    config = read_config(gguf)

    def opened(spec: Any) -> GgmlStage:
        return kind(gguf, config, open_device("CPU", 1), spec)

    subject = Subject(gguf, config, 32, lambda choice, spec: opened(spec))
    stages = list(_stages(subject))
    assert any(first > LAST_CUT for first, _ in stages)
    for layers in stages:
        probe = Probe(opened, config, layers, (4, 64, 256, 32), F16)
        assert probe.step(4, 64)().total > 0 and probe.step(32, 0)().total > 0
        probe.close()


def test_what_the_plan_knows(path: Path):
    gguf = open_gguf(path)
    config = read_config(gguf)
    facts = model_facts(gguf, config, Limits(max_num_seqs=2, max_num_batched_tokens=32))
    assert [size > 0 for size in facts.kv_bytes_per_token] == [True] * OWN + [False] * (LAYERS - OWN)
    assert facts.last_cut == LAST_CUT == config.last_cut
    assert [config.kv_layer(layer) for layer in range(LAYERS)] == [0, 1, 2, 1, 2, 1]
    classes = layer_classes(gguf, config)
    assert classes[0] == classes[1] and len(set(classes)) == 4
    sizes = {name: info.nbytes for name, info in gguf.tensors.items()}
    assert facts.common_bytes >= sizes["per_layer_model_proj.weight"]
    held = sum(sizes.values()) - sizes["per_layer_token_embd.weight"]
    assert facts.weight_bytes - facts.shared_bytes < 1.1 * held


def test_no_plan_takes_layers_from_their_keys(path: Path):
    settings = dataclasses.replace(SETTINGS, model=str(path), device=TWO["device"])
    plan = prepare(settings, measure=GUESSED).plan
    assert [stage.layers for stage in plan.stages] == [(0, LAST_CUT), (LAST_CUT, LAYERS)]
    with pytest.raises((PlanError, LaunchError), match="layers 1 to 5 attend the same keys and values"):
        prepare(dataclasses.replace(settings, split=(3, 3)), measure=GUESSED)
    many = [cpu(name, i) for i, name in enumerate("abc")]
    with pytest.raises(PlanError, match=r"3 devices .* layers 1 to 5 attend .* name fewer"):
        check_counts(settings, many, LAYERS, LAST_CUT)
