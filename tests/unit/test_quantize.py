"""`hetero quantize` as a user meets it, and the process that does the work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gguf_tools import Raw, head, kv, rewrite, split_gguf, write_gguf
from tiny_models import libllama_logits, tiny_model

import cli
from backends.ggml.lib import ggml
from backends.ggml.models import read_config
from quant.blocks import dequantize
from quant.encoders import encode
from quant.ftypes import FTYPES
from quant.gguf import open_gguf
from quant.types import GGML_TYPES, TYPE_IDS, row_bytes

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "cli", "quantize"]
K_QUANTS = {"n_embd": 256, "n_ff": 512, "n_heads": 8, "n_kv_heads": 4, "head_dim": 32}
# Case q01: how much perplexity may grow
Q8_0_PERPLEXITY, Q4_K_M_PERPLEXITY = 1.05, 1.25


def run(*arguments: str | Path) -> subprocess.CompletedProcess:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def run_here(*arguments: str | Path) -> subprocess.CompletedProcess:
    """The same without the start of a Python; libllama still runs in its own process."""
    result = CliRunner().invoke(cli.main, ["quantize", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return subprocess.CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr)


def assert_refused(done: subprocess.CompletedProcess, *words: str, code: int = 1) -> None:
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    lines = [line for line in done.stderr.splitlines() if "quantizing to" not in line]
    assert len(lines) == 1 and lines[0].startswith("hetero: "), done.stderr
    assert [w for w in words if w not in lines[0]] == [], lines[0]


def types_of(path: Path, ours: bool = True) -> dict[str, str]:
    with open_gguf(path) as file:
        if ours:
            read_config(file)
        return {t.name: GGML_TYPES[t.type].name for t in file.tensors.values()}


@pytest.fixture(scope="module")
def f16_path(smollm2_path: Path, tmp_path_factory) -> Path:
    """SmolLM2 with its matrices in F16: rows of 576 and 1,536 weights."""
    weights: dict[str, Raw | None] = {}
    with open_gguf(smollm2_path) as file:
        for t in file.tensors.values():
            if len(t.shape) > 1:
                values = dequantize(t.type, file.tensor_data(t.name), t.shape[::-1])
                weights[t.name] = Raw("F16", t.shape, values.astype("<f2").tobytes())
    path = rewrite(smollm2_path, tmp_path_factory.mktemp("q01") / "f16.gguf", {}, weights)
    yield path
    path.unlink()


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory) -> Path:
    """F32, rows of 256 and 512."""
    return tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", **K_QUANTS)


def perplexity(path: Path) -> float:
    """Of libllama, on the start of the packaged text."""
    from hetero.text.tokenizer import Tokenizer

    text = (ROOT / "hetero" / "data" / "quality.txt").read_text(encoding="utf-8")[:6000]
    ids = Tokenizer(path).encode(text, parse_special=False, add_special=True)[:256]
    logits = libllama_logits(path, ids)[:-1]
    top = logits.max(1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(1, dtype=np.float64)) + top[:, 0]
    return float(np.exp((log_sum - logits[np.arange(len(logits)), ids[1:]]).mean()))


@pytest.fixture(scope="module")
def f16_perplexity(f16_path: Path) -> float:
    return perplexity(f16_path)


def test_q01_rows_that_do_not_fit(f16_path: Path, f16_perplexity: float, tmp_path: Path):
    out = tmp_path / "a.gguf"
    done = run(f16_path, out, "Q4_K_M")
    assert done.returncode == 0, done.stderr
    with open_gguf(f16_path) as file:
        tensors = dict(file.tensors)
    types = types_of(out)
    listed = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    asked_bits, fell_back = {"Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625}, 0
    for name, info in tensors.items():
        if len(info.shape) == 1:
            assert types[name] == "F32"
        elif info.shape[0] % 256 and name != "token_embd.weight":
            length, asked, used = listed[name]
            assert (length, used) == ("576", types[name])
            fmt = GGML_TYPES[TYPE_IDS[used]]
            assert fmt.nbytes * 8 / fmt.elements >= asked_bits[asked]
            fell_back += 1
        elif info.shape[0] % 256 == 0:
            assert name not in listed and types[name] in ("Q4_K", "Q6_K")
    assert fell_back == 180
    nbytes = sum(
        row_bytes(TYPE_IDS[types[n]], t.shape[0]) * int(np.prod(t.shape[1:])) for n, t in tensors.items()
    )
    bits = nbytes * 8 / sum(int(np.prod(t.shape)) for t in tensors.values())
    assert f"-> {bits:.2f} bits per weight" in done.stdout.splitlines()[-1]
    assert perplexity(out) <= Q4_K_M_PERPLEXITY * f16_perplexity


def test_q01_an_explicit_type_that_does_not_fit(f16_path: Path, tmp_path: Path):
    done = run(f16_path, tmp_path / "b.gguf", "Q4_K_M", "--tensor-type", "attn_q=q4_k", "--json")
    assert done.returncode == 0, done.stderr
    fallbacks = {f["name"]: f for f in json.loads(done.stdout)["fallbacks"]}
    types = types_of(tmp_path / "b.gguf")
    for layer in range(30):
        name = f"blk.{layer}.attn_q.weight"
        assert fallbacks[name] == {"name": name, "row_length": 576, "asked": "Q4_K", "used": types[name]}


def test_q01_strict(f16_path: Path, tmp_path: Path):
    done = run(f16_path, tmp_path / "c.gguf", "Q4_K_M", "--strict")
    assert done.returncode == 1 and "--strict: 180 tensors" in done.stderr
    assert sum(" 576 " in line for line in done.stdout.splitlines()) == 180
    assert list(tmp_path.iterdir()) == []
    assert run(f16_path, "--dry-run", "--type", "Q4_K_M", "--strict").returncode == 1
    assert run(f16_path, "--dry-run", "--type", "Q8_0", "--strict").returncode == 0


def test_q01_q8_0(f16_path: Path, f16_perplexity: float, tmp_path: Path):
    """All rows fit Q8_0; each tensor's bytes are those of our own encoder."""
    out = tmp_path / "d.gguf"
    assert run(f16_path, out, "Q8_0").returncode == 0
    with open_gguf(f16_path) as before, open_gguf(out) as after:
        for name in ("blk.3.attn_k.weight", "blk.29.ffn_down.weight"):
            info = before.tensors[name]
            values = before.tensor_data(name).copy().view(np.float16).reshape(info.shape[::-1])
            assert np.array_equal(encode(TYPE_IDS["Q8_0"], values).reshape(-1), after.tensor_data(name))
    assert perplexity(out) <= Q8_0_PERPLEXITY * f16_perplexity


@pytest.mark.parametrize("type_name", ["Q4_K_M", "Q8_0"])
def test_q01_rows_of_14(type_name: str, tiny_path: Path, tmp_path: Path):
    odd = np.ones((3, 14), np.float32)
    source = rewrite(
        tiny_path, tmp_path / "odd.gguf", {}, {"blk.0.odd.weight": Raw("F32", (14, 3), odd.tobytes())}
    )
    done = run_here(source, tmp_path / "e.gguf", type_name, "--json")
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    asked = {"Q4_K_M": "Q4_K", "Q8_0": "Q8_0"}[type_name]
    assert table["fallbacks"] == [
        {"name": "blk.0.odd.weight", "row_length": 14, "asked": asked, "used": "F16"}
    ]
    assert types_of(tmp_path / "e.gguf", ours=False)["blk.0.odd.weight"] == "F16"


@pytest.mark.parametrize("type_name", ["Q5_K_M", "IQ4_XS", "BF16"])
def test_dry_run_tells_what_will_be(type_name: str, tiny_path: Path, tmp_path: Path):
    planned = run_here(tiny_path, tmp_path / "a.gguf", type_name, "--dry-run", "--json")
    assert planned.returncode == 0 and list(tmp_path.iterdir()) == []
    done = run_here(tiny_path, tmp_path / "a.gguf", type_name, "--json", "--threads", "1")
    assert done.returncode == 0, done.stderr
    plan, table = json.loads(planned.stdout), json.loads(done.stdout)
    assert plan["dry_run"] and not table["dry_run"]
    assert plan["tensors"] == table["tensors"] and plan["bytes_after"] == table["bytes_after"]
    with open_gguf(tmp_path / "a.gguf") as file:
        assert {t["name"]: (t["target"], t["bytes_after"]) for t in plan["tensors"]} == {
            t.name: (GGML_TYPES[t.type].name, t.nbytes) for t in file.tensors.values()
        }
        assert file.metadata["general.file_type"] == FTYPES[type_name]
    text = run_here(tiny_path, "--type", type_name, "--dry-run").stdout
    assert all(t["name"] in text for t in plan["tensors"]) and "nothing was written" in text
    assert f"{plan['bits_per_weight']:.2f} bits per weight" in text


def test_tensor_types(tiny_path: Path, tmp_path: Path):
    """The first expression that finds a tensor rules; norms stay as they are."""
    chosen = ("--tensor-type", r"blk\.0\.attn_v=q8_0", "--tensor-type", "attn_=Q6_K")
    done = run_here(tiny_path, tmp_path / "a.gguf", "--type", "q5_k_m", *chosen)
    assert done.returncode == 0, done.stderr
    types = types_of(tmp_path / "a.gguf")
    assert types["blk.0.attn_v.weight"] == "Q8_0" and types["blk.1.attn_v.weight"] == "Q6_K"
    assert types["blk.0.attn_output.weight"] == "Q6_K" and types["blk.0.attn_norm.weight"] == "F32"
    assert types["blk.0.ffn_up.weight"] == "Q5_K"
    assert np.isfinite(libllama_logits(tmp_path / "a.gguf", [5, 6, 7])).all()


def test_an_importance_matrix_is_used(tiny_path: Path, tmp_path: Path):
    """A tensor's bytes are ggml's with the mean squared inputs as weights; what has no entry is named."""
    rng, name = np.random.default_rng(0), "blk.0.ffn_up.weight"
    sums, count = rng.uniform(1, 50, (1, 256)).astype(np.float32), np.array([[8]], np.float32)
    entries = {f"{name}.in_sum2": sums, f"{name}.counts": count}
    matrix = write_gguf(tmp_path / "imatrix.gguf", {"general.type": "imatrix"}, entries)
    done = run_here(tiny_path, tmp_path / "a.gguf", "Q4_K_S", "--imatrix", matrix)
    assert done.returncode == 0, done.stderr
    assert "blk.1.ffn_up.weight" in done.stdout and name not in done.stdout
    with open_gguf(tiny_path) as before, open_gguf(tmp_path / "a.gguf") as after:
        values = before.tensor_data(name).copy().view(np.float32).reshape(-1, 256)
        wanted, weights = np.empty(after.tensors[name].nbytes, np.uint8), sums / count
        pointers = values.ctypes.data, wanted.ctypes.data
        ggml().quantize_chunk(TYPE_IDS["Q4_K"], *pointers, 0, *values.shape, weights.ctypes.data)
        assert np.array_equal(after.tensor_data(name), wanted)


def test_another_alignment(tiny_path: Path, tmp_path: Path):
    """libllama pads to 32 bytes whatever the file says: the copy must say so."""
    source = rewrite(tiny_path, tmp_path / "64.gguf", {"general.alignment": 64})
    for path, out in ((tiny_path, "a.gguf"), (source, "b.gguf")):
        assert run_here(path, tmp_path / out, "Q6_K").returncode == 0
    a, b = (libllama_logits(tmp_path / out, [5, 6, 7]) for out in ("a.gguf", "b.gguf"))
    assert np.array_equal(a, b)


def test_quantizing_again_must_be_asked_for(smollm2_path: Path, tmp_path: Path):
    out = tmp_path / "a.gguf"
    assert_refused(run_here(smollm2_path, out, "Q4_0"), "already quantized", "Q4_1", "--allow-requantize")
    assert list(tmp_path.iterdir()) == []
    assert "--allow-requantize" in run_here(smollm2_path, "--type", "Q4_0", "--dry-run").stdout
    done = run_here(smollm2_path, out, "Q4_0", "--allow-requantize")
    assert done.returncode == 0 and types_of(out)["blk.0.attn_q.weight"] == "Q4_0"


def test_files_that_are_refused(tiny_path: Path, tmp_path: Path):
    out, hostile = tmp_path / "o.gguf", tmp_path / "g01.gguf"
    hostile.write_bytes(head(0, 1) + kv("", "u8", b"\x01"))
    before = sum(os.times()[2:4])  # CPU seconds of children
    assert_refused(run(hostile, out, "Q8_0"), "g01.gguf", "entry 0")
    assert sum(os.times()[2:4]) - before < 1.0
    hostile.write_bytes(tiny_path.read_bytes()[:3000])
    assert_refused(run_here(hostile, out, "Q8_0"), "g01.gguf")
    hostile.write_text("hello")
    assert_refused(run_here(hostile, out, "Q8_0"), "not a GGUF file")
    empty = write_gguf(tmp_path / "empty.gguf", {"general.architecture": "llama"}, {})
    assert_refused(run_here(empty, out, "Q8_0"), "no tensors")
    strange = write_gguf(
        tmp_path / "s.gguf", {"general.architecture": "zz"}, {"a.weight": np.ones((2, 32), "f4")}
    )
    assert_refused(run_here(strange, out, "Q8_0"), "s.gguf", "zz")
    bad = np.full((4, 256), np.nan, np.float32)
    infinite = {"blk.0.bad.weight": Raw("F32", (256, 4), bad.tobytes())}
    assert_refused(
        run_here(rewrite(tiny_path, tmp_path / "n.gguf", {}, infinite), out, "Q8_0"),
        "n.gguf",
        "blk.0.bad.weight",
        "invalid data",
    )
    assert_refused(run_here("nothing.gguf", out, "Q8_0"), "nothing.gguf", "no such file")
    assert not out.exists() and not list(tmp_path.glob(".*"))


def test_outputs_that_are_refused(tiny_path: Path, tmp_path: Path):
    out = tmp_path / "o.gguf"
    out.write_text("mine")
    assert_refused(run_here(tiny_path, out, "Q8_0"), "o.gguf", "exists", "--force")
    assert out.read_text() == "mine"
    copy = tmp_path / "copy.gguf"
    shutil.copy(tiny_path, copy)
    assert_refused(run_here(copy, copy, "Q8_0", "--force"), "itself")
    assert_refused(run_here(tiny_path, tmp_path, "Q8_0", "--force"), "not a file")
    assert_refused(run_here(tiny_path, tmp_path / "none" / "o.gguf", "Q8_0"), "no folder")
    assert run_here(tiny_path, out, "Q8_0", "--force").returncode == 0
    assert types_of(out)["blk.0.attn_q.weight"] == "Q8_0"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy.gguf", "o.gguf"]


def test_wrong_use(tiny_path: Path, tmp_path: Path):
    out = tmp_path / "o.gguf"
    assert_refused(run_here(tiny_path, out, "Q9"), "--type Q9", "Q5_K_M", code=2)
    assert_refused(run_here(tiny_path, out, "Q8_0", "--tensor-type", "attn"), "REGEX=TYPE", code=2)
    assert_refused(run_here(tiny_path, out, "Q8_0", "--tensor-type", "attn=Q8_K"), "REGEX=TYPE", code=2)
    assert_refused(run_here(tiny_path, out, "Q8_0", "--tensor-type", "a[=Q6_K"), "regular expression", code=2)
    assert_refused(run_here(tiny_path, out, "F16", "--tensor-type", "attn=Q6_K"), "no effect", code=2)
    assert_refused(run_here(tiny_path, out, "Q8_0", "--tensor-type", "attm=Q6_K"), "attm", "no tensor")
    assert_refused(run_here(tiny_path, out, "Q8_0", "--imatrix", tmp_path / "none"), "none")
    assert_refused(run_here(tiny_path, out, "Q8_0", "--imatrix", tiny_path), "not an importance matrix")
    assert_refused(run_here(tiny_path, out, "IQ2_XS"), "IQ2_XS", "--imatrix")
    for arguments in (
        (tiny_path, out),
        (tiny_path, out, "Q8_0", "--type", "Q8_0"),
        (tiny_path, "--type", "Q8_0"),
    ):
        done = run_here(*arguments)
        assert done.returncode == 2 and "Error: give" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tensor", ["zero", "cut", "infinite"])
def test_a_bad_importance_matrix(tensor: str, tiny_path: Path, tmp_path: Path):
    sums = np.full((1, 256), np.inf if tensor == "infinite" else 1, np.float32)
    entries = {"w.in_sum2": sums, "w.counts": np.ones((1, 1), np.float32)}
    if tensor == "zero":
        del entries["w.counts"]
    elif tensor == "cut":
        entries["w.counts"] = np.ones((1, 2), np.float32)
    matrix = write_gguf(tmp_path / "m.gguf", {"general.type": "imatrix"}, entries)
    assert_refused(run_here(tiny_path, tmp_path / "o.gguf", "Q4_K_M", "--imatrix", matrix), "m.gguf", "w.")


def test_a_split_model_becomes_one_file(tiny_path: Path, tmp_path: Path):
    parts = split_gguf(tiny_path, tmp_path / "tiny", 3)
    whole, joined = tmp_path / "whole.gguf", tmp_path / "joined.gguf"
    for source, out in ((tiny_path, whole), (parts[0], joined)):
        done = run_here(source, out, "Q6_K")
        assert done.returncode == 0, done.stderr
    with open_gguf(whole) as one, open_gguf(joined) as other:
        assert not any(key.startswith("split.") for key in other.metadata)
        assert list(other.metadata) == list(one.metadata) and set(other.tensors) == set(one.tensors)
        for name, info in one.tensors.items():
            assert other.tensors[name].type == info.type
            assert other.tensor_data(name).tobytes() == one.tensor_data(name).tobytes()
    assert_refused(run_here(parts[0], parts[2], "Q6_K", "--force"), parts[2].name, "itself")
    assert_refused(run_here(parts[1], tmp_path / "b.gguf", "Q6_K"), "load the first part", parts[0].name)
    parts[2].unlink()
    assert_refused(run_here(parts[0], tmp_path / "b.gguf", "Q6_K"), parts[2].name, "part 3 of 3")
