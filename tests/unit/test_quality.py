"""Comparing two models: the command as a user meets it, on real and on tiny models."""

from __future__ import annotations

import importlib.resources
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from click.testing import CliRunner, Result
from gguf_tools import Raw
from one_line import assert_one_line
from quality_tools import compared
from tiny_models import libllama_logits, tiny_model

import cli
from backends.ggml.layers import DeviceLayers
from backends.ggml.stage import GgmlStage
from hetero import windows
from hetero.commands import quality as command
from hetero.kv_types import KVTypes
from hetero.plan.devices import DeviceChoice
from hetero.settings import Settings
from hetero.text.tokenizer import Tokenizer


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["quality", *map(str, arguments)], catch_exceptions=False)


def report(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the ring in the sea and her ear <|im_end|> near the inner tree. " * 48, encoding="utf-8")
    return path


def q4_0(values: np.ndarray) -> Raw:
    """Rows of whole 32-element blocks [rows, k], encoded the simplest way: scale f16, 16 bytes of nibbles."""
    blocks = values.reshape(-1, 32)
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / 7).astype(np.float16)
    codes = np.clip(np.rint(blocks / scale.astype(np.float32)) + 8, 0, 15).astype(np.uint8)
    data = np.concatenate([scale.view(np.uint8), codes[:, :16] | codes[:, 16:] << 4], axis=1)
    return Raw("Q4_0", values.shape[::-1], data.tobytes())


def quantized_copy(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Path:
    """The model that tiny_model makes, its matrices as Q4_0."""
    made = tiny_models.random_tensor

    def random_tensor(rng, shape, type_name, deviation):
        values = made(rng, shape, type_name, deviation)
        assert isinstance(values, np.ndarray)
        return q4_0(values)

    monkeypatch.setattr(tiny_models, "random_tensor", random_tensor)
    return tiny_model(path, **options)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_the_numbers_are_those_of_libllamas_logits(arch: str, tmp_path: Path, text: Path):
    """Windows, BOS, the scored half and what follows each position, checked from outside."""
    paths = [tiny_model(tmp_path / f"{seed}.gguf", arch, seed) for seed in (1, 2)]
    found = report(*paths, "--text", text, "--tokens", 310, "--ctx", 100)
    tokenizer = Tokenizer(paths[0])
    ids = tokenizer.encode(text.read_text(encoding="utf-8"), parse_special=False, add_special=True)
    parts: list[list[np.ndarray]] = [[], [], []]
    for start in (0, 100, 200):
        window = ids[start : start + 100]
        if arch == "gemma3":
            window[0] = tokenizer.bos_id
        for part, path in zip(parts, paths, strict=False):
            part.append(libllama_logits(path, window)[50:99])
        parts[2].append(np.array(window[51:]))
    want = compared(*(np.concatenate(part) for part in parts))
    assert (found["windows"], found["tokens_scored"], want.tokens) == (3, 147, 147)
    # an f16 cache against libllama's f32 one
    assert found["reference"]["perplexity"]["value"] == pytest.approx(want.reference_ppl.value, rel=1e-3)
    assert found["other"]["perplexity"]["value"] == pytest.approx(want.other_ppl.value, rel=1e-3)
    assert found["kl"]["mean"] == pytest.approx(want.kl_mean.value, rel=1e-3)
    assert found["kl"]["max"] == pytest.approx(want.kl_max, rel=1e-2)
    assert found["top1_agreement"] == pytest.approx(want.top1, abs=2 / 147)


def test_a_quantized_model_is_near_and_limits_gate_it(tmp_path: Path, text: Path, monkeypatch):
    # With so small a vocabulary the chunks without logits need the largest compute buffer: it moves.
    full = tiny_model(tmp_path / "f32.gguf")
    small = quantized_copy(tmp_path / "q4_0.gguf", monkeypatch)
    arguments = (full, small, "--text", text, "--tokens", 256, "--ctx", 128)
    found = report(*arguments, "--max-kl", 1, "--max-ppl-ratio", 2, "--min-top1", 0.2)
    assert 0 < found["kl"]["mean"] < found["kl"]["p90"] < found["kl"]["p99"] <= found["kl"]["max"] < 2
    assert 0.5 < found["top1_agreement"] < 1
    assert (found["reference"]["quantization"], found["other"]["quantization"]) == ("F32", "Q4_0")
    assert found["broken"] == []

    failed = run(*arguments, "--max-kl", 1e-6, "--min-top1", 1, "--max-ppl-ratio", 2, "--json")
    assert failed.exit_code == 1
    lines = [line for line in failed.stderr.splitlines() if line.startswith("hetero: ")]
    assert [line.split()[1] for line in lines] == ["--max-kl", "--min-top1"]
    assert len(json.loads(failed.stdout)["broken"]) == 2


def test_smollm2_against_itself(smollm2_path: Path):
    found = report(smollm2_path, smollm2_path, "--tokens", 256, "--ctx", 256, "--max-kl", 0, "--min-top1", 1)
    assert (found["kl"]["mean"], found["kl"]["max"], found["top1_agreement"]) == (0, 0, 1)
    assert found["reference"] == found["other"]
    assert 5 < found["reference"]["perplexity"]["value"] < 60
    assert (found["tokens_scored"], found["text"]) == (127, None)


def test_a_windowed_pool_smaller_than_the_text_gives_the_same(tmp_path: Path, text: Path, monkeypatch):
    paths = [tiny_model(tmp_path / f"{i}.gguf", "gemma3", i, n_ctx=2048, sliding_window=16) for i in (1, 2)]
    arguments = (*paths, "--text", text, "--tokens", 1800, "--ctx", 1800)
    whole = report(*arguments)
    monkeypatch.setattr(windows, "CHUNK", 16)
    prepared = windows.prepare_model(Settings(), str(paths[0]), 1800)
    assert min(group.num_blocks for group in prepared.plan.groups) * 16 < 1700  # its blocks are used again
    assert report(*arguments)["kl"] == pytest.approx(whole["kl"], rel=1e-4)


def test_the_table_says_all(tmp_path: Path, text: Path):
    model = tiny_model(tmp_path / "tiny.gguf")
    result = run(model, model, "--text", text, "--tokens", 64, "--ctx", 64)
    assert result.exit_code == 0
    wanted = (
        "tiny",
        "F32",
        "perplexity",
        "±",
        "nats",
        "90 %",
        "99 %",
        "largest",
        "100.00 %",
        "31 in 1 windows",
    )
    assert [w for w in wanted if w not in result.stdout] == []
    assert "the reference: loading" in result.stderr and "comparing" in result.stderr


@pytest.fixture
def plain_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as a device without kernels of ours."""
    monkeypatch.setattr(GgmlStage, "_kind", lambda self: DeviceLayers)
    monkeypatch.setattr(DeviceChoice, "own_kernels", False)
    monkeypatch.setenv("HETERO_ISOLATE", "off")  # else it would be somewhere else


def test_formats_of_the_kv_cache(tmp_path: Path, text: Path, plain_operators: None):
    model = tiny_model(tmp_path / "tiny.gguf", head_dim=32)
    arguments = (
        model,
        "--kv-type",
        "q8_0,k=q8_0,v=f16,fp8,f16",
        "--text",
        text,
        "--tokens",
        128,
        "--ctx",
        64,
    )
    found = report(*arguments, "--max-kl", 0.1)
    formats = {one["kv_type"]: one for one in found["formats"]}
    assert [one["kept"] for one in formats.values()] == ["q8_0", "k=q8_0,v=f16", "q8_0", "f16"]
    assert (formats["f16"]["kl"]["max"], formats["f16"]["top1_agreement"]) == (0, 1)
    assert formats["fp8"]["kl"] == formats["q8_0"]["kl"]
    assert 0 < formats["k=q8_0,v=f16"]["kl"]["mean"] < 0.01 and 0 < formats["q8_0"]["kl"]["mean"] < 0.01
    assert found["tokens_scored"] == 2 * 31 and found["broken"] == []

    failed = run(*arguments, "--max-kl", 1e-9)
    assert failed.exit_code == 1
    lines = [line for line in failed.stderr.splitlines() if line.startswith("hetero: ")]
    assert [line.split()[1] for line in lines] == ["q8_0:", "k=q8_0,v=f16:", "fp8:"]
    assert "fp8 (kept as q8_0)" in failed.stdout and "62 scored in 2 windows of 64" in failed.stdout


def test_a_format_that_the_heads_do_not_fit(tmp_path: Path, text: Path):
    model = tiny_model(tmp_path / "tiny.gguf", head_dim=16)
    assert_one_line(run(model, "--kv-type", "f16,q8_0", "--text", text), "--kv-type q8_0", "multiple of 32")


def test_different_vocabularies_are_refused(tmp_path: Path, text: Path):
    first = tiny_model(tmp_path / "a.gguf")
    longer = tiny_model(tmp_path / "b.gguf", "gemma3")
    assert_one_line(run(first, longer, "--text", text), "a.gguf", "b.gguf", "311 and 353 tokens")

    tokens = list(tiny_models.bpe_vocab()["tokenizer.ggml.tokens"])
    tokens[7], tokens[8] = tokens[8], tokens[7]
    swapped = tiny_model(tmp_path / "c.gguf", metadata={"tokenizer.ggml.tokens": tokens})
    assert_one_line(run(first, swapped, "--text", text), "token 7 is ", repr(tokens[8]), repr(tokens[7]))


def test_bad_input_is_one_line(tmp_path: Path, text: Path):
    model = tiny_model(tmp_path / "tiny.gguf")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short").write_text("the ring")
    (tmp_path / "notes.gguf").write_text("hello")
    assert_one_line(run(model, tmp_path / "none.gguf"), "none.gguf", "no such file")
    assert_one_line(run(tmp_path / "notes.gguf", model), "notes.gguf", "not a GGUF file")
    assert_one_line(run(model, model, "--text", tmp_path / "none"), "--text", "none", "No such file")
    assert_one_line(run(model, model, "--text", tmp_path), "--text", str(tmp_path))
    assert_one_line(run(model, model, "--text", tmp_path / "binary"), "--text", "binary")
    assert_one_line(
        run(model, model, "--text", tmp_path / "short"), "tokens, less than one window of --ctx 512"
    )
    assert_one_line(run(model, model, "--ctx", 1024), "--ctx 1024", "tiny.gguf", "512")
    assert_one_line(run(model, model, "--device", "CUDA9"), "CUDA9")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("a.gguf",),
        ("a.gguf", "b.gguf", "--kv-type", "fp8"),
        ("a.gguf", "--kv-type", "fp8,f8"),
        ("a.gguf", "--kv-type", ""),
        ("a.gguf", "b.gguf", "--tokens", 100),
        ("a.gguf", "b.gguf", "--tokens", 0),
        ("a.gguf", "b.gguf", "--ctx", 4),
        ("a.gguf", "b.gguf", "--max-kl", -1),
        ("a.gguf", "b.gguf", "--min-top1", 90),
        ("a.gguf", "b.gguf", "--max-ppl-ratio", "x"),
    ],
)
def test_bad_usage_is_exit_code_2(arguments: tuple[object, ...]):
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "") and result.stderr


def test_models_are_compared_in_f16_whatever_is_served(tmp_path: Path):
    path = str(tiny_model(tmp_path / "tiny.gguf"))
    prepared = windows.prepare_model(Settings(kv_type=KVTypes("fp8", "fp8")), path, 64)
    assert prepared.plan.stages[0].kv_types == KVTypes("f16", "f16")


def test_two_models_that_do_not_fit_together(tmp_path: Path, monkeypatch):
    prepared = windows.prepare_model(Settings(), str(tiny_model(tmp_path / "tiny.gguf")), 64)
    command.check_memory(prepared, prepared)
    tight = replace(prepared, plan=replace(prepared.plan, free_bytes=prepared.plan.total_bytes))
    with pytest.raises(command.LaunchError, match="not enough memory on CPU for both"):
        command.check_memory(tight, tight)


def test_the_packaged_text_is_long_and_plain(smollm2_path: Path):
    body = (importlib.resources.files("hetero") / "data" / "quality.txt").read_text(encoding="utf-8")
    assert 20_000 < len(body.encode()) < 30_000
    ids = windows.read_tokens(Tokenizer(smollm2_path), None, 100_000)
    assert len(ids) > 12 * 512
    assert {c for c in body if not c.isprintable()} == {"\n"}
