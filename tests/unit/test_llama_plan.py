"""What is known of a model before libllama loads it, and the plan that follows."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fake_stage import GIB, cpu, gpu
from gguf_tools import write_gguf
from llama_models import FAMILIES as TINY
from tiny_models import bpe_vocab, tiny_model

from backends.base import DeviceSpec
from backends.ggml.models import FAMILIES, ModelError
from backends.llama.config import HYBRID, NOT_SERVED, RECURRENT, read_llama_config
from backends.llama.library import knows
from backends.llama.spec import LlamaSpec, read_spec
from hetero.commands import plan as command
from hetero.kv_types import KVTypes
from hetero.plan.devices import DeviceChoice
from hetero.plan.fallback import arrange, llama_spec, plan_fallback
from hetero.plan.make import PlanError
from hetero.prepare import LaunchError, prepare
from hetero.settings import FolderLimit, Settings
from quant.gguf import open_gguf

MIB = 1 << 20


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("llama")
    return {name: make(folder / f"{name}.gguf") for name, make in TINY.items()} | {
        "deep": tiny_model(folder / "deep.gguf", n_layers=8, n_ctx=8192)
    }


def planned(path: Path, choices: list[DeviceChoice], settings: Settings):
    gguf = open_gguf(path)
    config = read_llama_config(gguf)
    ordered, settings = arrange(config, choices, settings)
    made = plan_fallback(gguf, config, ordered, settings)
    return made, llama_spec(made.plan, config, ordered, settings)


def test_a_plan_counts_what_libllama_will_hold(paths: dict[str, Path]) -> None:
    made, spec = planned(paths["stablelm"], [cpu("CPU")], Settings(max_num_seqs=4))
    gguf, (stage,) = open_gguf(paths["stablelm"]), made.plan.stages
    assert stage.weight_bytes == sum(info.nbytes for info in gguf.tensors.values())
    assert made.plan.kv_tokens == 4 * 512 and made.plan.fits
    assert stage.kv_bytes >= made.plan.kv_tokens * 2 * 2 * (32 + 32)  # layers, bytes, keys and values
    assert spec == LlamaSpec((), (), 100, made.plan.kv_tokens + 16, 1)
    assert made.forecast is None


def test_states_take_memory_for_each_request(paths: dict[str, Path]) -> None:
    sizes = []
    for seqs in (1, 33):
        made, spec = planned(paths["mamba2"], [cpu("CPU")], Settings(max_num_seqs=seqs))
        assert spec.sequences == seqs and not spec.keeps_prefixes
        assert made.plan.stages[0].kv_bytes == 0 and "a state of its own" in made.plan.reasons[0]
        sizes.append(made.plan.total_bytes)
    state = read_llama_config(open_gguf(paths["mamba2"])).state_bytes
    assert sizes[1] - sizes[0] >= 32 * state > 0
    assert sum("states" in note or "guessed ahead" in note for note in made.plan.notes) == 2


def test_layers_follow_the_plan(paths: dict[str, Path]) -> None:
    """libllama's first layers are the CPU's, wherever --device has it; --split goes along."""
    choices = [gpu("CUDA0"), cpu("CPU"), gpu("CUDA1")]
    given = Settings(device=("CUDA0", "CPU", "CUDA1"), split=(3, 1, 4), max_num_seqs=2)
    made, spec = planned(paths["deep"], choices, given)
    assert [(s.device, s.layers) for s in made.plan.stages] == [
        ("CPU", (0, 1)), ("CUDA0", (1, 4)), ("CUDA1", (4, 8)),
    ]  # fmt: skip
    assert [d.name for d in spec.devices] == ["CUDA0", "CUDA1"] and spec.layers == (3, 4)
    assert spec.threads == 1
    small = [gpu("CUDA0", 2 * MIB), gpu("CUDA1", 8 * GIB)]
    made, spec = planned(paths["deep"], small, Settings(max_num_seqs=2, kv_tokens=2048))
    counts = dict(zip([d.name for d in spec.devices], spec.layers, strict=True))
    assert counts["CUDA1"] > counts.get("CUDA0", 0) and sum(counts.values()) == 8
    assert made.plan.fits


def test_a_plan_that_does_not_fit_is_returned(paths: dict[str, Path]) -> None:
    made, _ = planned(paths["deep"], [gpu("CUDA0", MIB)], Settings(max_num_seqs=2))
    assert not made.plan.fits


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_type": KVTypes("fp8", "f16")}, ["--kv-type k=fp8,v=f16", "no fp8", "q8_0"]),
        ({"kv_type": KVTypes("q8_0", "q8_0")}, ["--kv-type q8_0", "multiple of 32", "use f16"]),
        ({"ram_cache": GIB}, ["--ram-cache", "leave it out"]),
        ({"disk_cache": FolderLimit("/x", GIB)}, ["--disk-cache", "leave it out"]),
        ({"max_num_seqs": 257}, ["--max-num-seqs 257", "256"]),
        ({"split": (1, 2), "device": ("CPU",)}, ["--split 1,2"]),
    ],
)
def test_what_cannot_be_had_is_refused(paths: dict[str, Path], change: dict, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        planned(paths["stablelm"], [cpu("CPU")], Settings(**change))
    assert all(word in str(caught.value) for word in words), caught.value


def test_devices_that_libllama_lacks_are_refused(paths: dict[str, Path]) -> None:
    away = replace(cpu("worker=h:1/CPU"), spec=DeviceSpec("CPU", worker="h:1"))
    for choices, words in (([away], "worker=h:1/CPU: a worker"), ([cpu("CPU"), cpu("CPU")], "one CPU")):
        with pytest.raises(PlanError, match=words):
            planned(paths["stablelm"], choices, Settings())


def test_guesses_that_could_not_be_taken_back_are_refused(paths: dict[str, Path]) -> None:
    with pytest.raises(PlanError, match=r"--spec draft:x\.gguf: this model's states"):
        planned(paths["mamba2"], [cpu("CPU")], Settings(spec="draft:x.gguf"))


def test_the_plan_says_who_computes(paths: dict[str, Path]) -> None:
    for path, engine, why in (
        (paths["mpt"], "auto", "no graph of ours for family 'mpt'"),
        (paths["deep"], "llama", "as --engine says"),
    ):
        prepared = prepare(Settings(model=str(path), max_num_seqs=2, engine=engine))
        assert any(why in note for note in prepared.plan.notes)
        table = command.as_table(prepared)
        assert table["engine"] == "libllama" and table["host"]["nbytes"] == 0
        json.dumps(table)
    assert command.as_table(prepare(Settings(model=str(paths["deep"]))))["engine"] == "hetero"


def test_a_plan_is_printed(paths: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.plan(Settings(model=str(paths["mamba2"]), max_num_seqs=2), False, None) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "RAM cache  none (libllama's cache stays where it is)" in lines
    assert not any("tokens in the same memory" in line for line in lines)


def test_its_layers_are_not_timed(paths: dict[str, Path]) -> None:
    from hetero.prepare import measure_devices

    with pytest.raises(LaunchError, match=r"mpt\.gguf: libllama computes it"):
        measure_devices(Settings(model=str(paths["mpt"])), lambda *_: None)


def metadata(arch: str, **values: object) -> dict[str, object]:
    sizes = {"block_count": 2, "context_length": 128, "embedding_length": 64, "attention.head_count": 4}
    known = sizes | {key.replace("__", "."): value for key, value in values.items()}
    named = {f"{arch}.{key}": value for key, value in known.items() if value is not None}
    return {"general.architecture": arch, **named, **bpe_vocab()}


@pytest.mark.parametrize("arch", ["clip", "bert", "dream", "t5", "pockettts", "eagle3"])
def test_what_generates_no_text_is_refused(tmp_path: Path, arch: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata(arch), {})
    with pytest.raises(LaunchError) as caught:
        prepare(Settings(model=str(path)))
    line = str(caught.value)
    assert line.startswith(f"m.gguf: model family '{arch}': ") and "\n" not in line
    assert any(remedy in line for remedy in ("take ", "name that model's own"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_count": None}, "falcon.block_count must be an integer between 1 and 4096, it is missing"),
        ({"context_length": "long"}, "falcon.context_length must be"),
        ({"attention__head_count": ["a", "x"]}, "falcon.attention.head_count must be a number"),
        ({"attention__head_count_kv": [4]}, "falcon.attention.head_count_kv must be a number"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, change: dict, words: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata("falcon", **change), {})
    with pytest.raises(ModelError, match=words):
        read_llama_config(open_gguf(path))


def test_a_family_that_nobody_knows(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata("nonsense"), {})
    with pytest.raises(
        LaunchError, match=r"^m\.gguf: model family 'nonsense' is known neither .* take another"
    ):
        prepare(Settings(model=str(path)))
    assert knows("falcon") and knows("llama")


def test_layers_may_differ(tmp_path: Path) -> None:
    """A hybrid: keys and values in one layer, a state in the other."""
    values = metadata(
        "lfm2", attention__head_count_kv=[0, 2], shortconv__l_cache=3, feed_forward_length=[128, 256]
    )
    config = read_llama_config(open_gguf(write_gguf(tmp_path / "m.gguf", values, {})))
    assert config.kv_widths == ((0, 0), (32, 32)) and config.n_ff == 256
    assert not config.keeps_prefixes and config.keeps_tokens
    assert config.state_bytes == 4 * 64 * 3


def test_states_are_told_by_the_metadata(tmp_path: Path) -> None:
    """Of a family that is younger than our lists."""
    path = write_gguf(tmp_path / "m.gguf", metadata("younger", ssm__inner_size=128, ssm__state_size=16), {})
    assert not read_llama_config(open_gguf(path)).keeps_prefixes


_KINDS = """
import ctypes, json, sys
import llama_cpp.llama_cpp as llama
quiet = llama.llama_log_callback(lambda level, text, data: None)
llama.llama_log_set(quiet, ctypes.c_void_p(0))
params = llama.llama_model_default_params()
params.vocab_only = True
kinds = {}
for path in sys.argv[1:]:
    model = llama.llama_model_load_from_file(path.encode(), params)
    kinds[path] = model and [
        llama.llama_model_is_recurrent(model), llama.llama_model_is_hybrid(model),
        llama.llama_model_is_diffusion(model), llama.llama_model_has_encoder(model)]
print(json.dumps(kinds))
"""


def test_the_lists_are_libllamas(tmp_path: Path) -> None:
    """Families that it has as recurrent, hybrid, diffusion and encoding ones."""
    known = {*RECURRENT, *HYBRID, *NOT_SERVED, *FAMILIES, "stablelm", "mpt", "olmoe", "falcon", "deepseek2"}
    files = {}
    for arch in known - {"clip"}:
        files[str(write_gguf(tmp_path / f"{arch}.gguf", metadata(arch), {}))] = arch
    code = [sys.executable, "-c", _KINDS, *files]
    done = subprocess.run(code, check=True, capture_output=True, text=True, timeout=60)
    for path, kinds in json.loads(done.stdout).items():
        arch = files[path]
        if kinds is None:  # an older libllama does not know it
            assert arch in NOT_SERVED, f"libllama does not know {arch}"
            continue
        recurrent, hybrid, diffusion, encodes = kinds
        assert recurrent == (arch in RECURRENT), arch
        assert hybrid == (arch in HYBRID), arch
        assert arch in NOT_SERVED or not (diffusion or encodes), arch


def test_a_spec_survives_json() -> None:
    card = DeviceSpec("CUDA0", "0000:01:00.0", cores=(1, 2))
    spec = LlamaSpec((card,), (12,), 128, 4096, 4, False, "q8_0", "f16")
    assert read_spec(json.loads(json.dumps(asdict(spec)))) == spec
    for wrong in (None, {}, asdict(spec) | {"more": 1}, asdict(spec) | {"layers": []}):
        with pytest.raises(ValueError):
            read_spec(wrong)
