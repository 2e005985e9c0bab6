"""Collecting an importance matrix: the sums against a numpy model, the file against its readers."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
from click.testing import CliRunner, Result
from gguf.quants import dequantize
from one_line import assert_one_line
from reference_experts import route
from tiny_experts import Sizes, tiny_experts
from tiny_models import tiny_model

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
import reference

import cli
from backends.ggml.models import read_config
from hetero.text.tokenizer import Tokenizer
from hetero.windows import cut
from quant.gguf import GGUFFile, open_gguf
from quant.imatrix import load_imatrix
from quant.imatrix_writer import save_imatrix

F32_BOUND = 1e-3  # relative, of each column's sum: f16 keys and values are what is rounded
Q8_BOUND = 0.03  # relative error of norms: activations are rounded to 8 bits, layer after layer
TOKENS, CTX = 250, 100  # two windows, of a full chunk and a part of one


class Watched:
    """A matrix [m, n] that sums up the squares of what is multiplied by its transpose."""

    __array_ufunc__ = None  # leaves ndarray @ Watched to us

    def __init__(self, values: np.ndarray):
        self.values, self.sums = values, np.zeros(values.shape[1])

    @property
    def T(self) -> Watched:
        return self

    def __rmatmul__(self, x: np.ndarray) -> np.ndarray:
        self.sums += np.square(x).sum(axis=0)
        return x @ self.values.T


def numpy_sums(path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """What the importance matrix of the text must be, by weight name."""
    watched: dict[str, Watched] = {}

    def tensor(file: GGUFFile, name: str) -> Any:
        info = file.tensors[name]
        kind = gguf_package.GGMLQuantizationType(info.type)
        rows = file.tensor_data(name).reshape(info.shape[1] if len(info.shape) == 2 else 1, -1)
        values = dequantize(rows, kind).astype(np.float64).reshape(info.shape[::-1])
        if not name.startswith("blk.") or len(info.shape) == 1:
            return values
        return watched.setdefault(name, Watched(values))

    monkeypatch.setattr(reference, "_tensor", tensor)
    tokenizer = Tokenizer(path)
    ids = tokenizer.encode(text.read_text(encoding="utf-8"), parse_special=False, add_special=True)
    with open_gguf(path) as file:
        for window in cut(ids[:TOKENS], CTX, tokenizer):
            reference.forward(file, read_config(file), window.tolist(), np.float16)
    return {name: matrix.sums for name, matrix in watched.items()}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["imatrix", *map(str, arguments)], catch_exceptions=False)


def collected(path: Path, text: Path) -> dict[str, np.ndarray]:
    """Sums by weight name, read back from the command's file by the gguf package."""
    out = path.with_suffix(".imatrix")
    result = run(path, out, "--text", text, "--tokens", TOKENS, "--ctx", CTX)
    assert result.exit_code == 0, result.stderr
    assert "over 200 tokens in 2 windows" in result.stdout and "collecting" in result.stderr
    tensors = {t.name: t.data for t in gguf_package.GGUFReader(out).tensors}
    assert {float(t[0, 0]) for name, t in tensors.items() if name.endswith(".counts")} == {200.0}
    return {n.removesuffix(".in_sum2"): t[0] for n, t in tensors.items() if n.endswith(".in_sum2")}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the ring in the sea, and her ear near the inner tree. " * 12, encoding="utf-8")
    return path


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_sums_are_those_of_a_numpy_model(arch: str, tmp_path: Path, text: Path, monkeypatch):
    path = tiny_model(tmp_path / "tiny.gguf", arch, 3)
    want, found = numpy_sums(path, text, monkeypatch), collected(path, text)
    assert found.keys() == want.keys() and len(want) == 2 * 7
    for name, sums in want.items():
        assert np.abs(found[name] - sums).max() <= F32_BOUND * sums.max(), name


def test_matrices_of_our_own_kernels_are_watched_too(tmp_path: Path, text: Path, monkeypatch):
    path = tiny_model(tmp_path / "tiny.gguf", "llama", 4, weight_type="Q8_0")
    want, found = numpy_sums(path, text, monkeypatch), collected(path, text)
    assert found.keys() == want.keys()
    for name, sums in want.items():
        assert np.linalg.norm(found[name] - sums) <= Q8_BOUND * np.linalg.norm(sums), name


def test_sums_of_experts_are_those_of_a_numpy_model(tmp_path: Path, text: Path, monkeypatch):
    path = tiny_model(tmp_path / "tiny.gguf", "llama", 5, n_experts=4)
    want: dict[str, np.ndarray] = defaultdict(lambda: np.zeros((4, 1)))
    whole = reference.mixture

    def recorded(h, w, b, m, activate):
        for x, ids in zip(h, route(h @ w[b + "ffn_gate_inp.weight"].T, m)[0], strict=True):
            for e in ids:
                gate, up = (w[f"{b}ffn_{part}_exps.weight"][e] @ x for part in ("gate", "up"))
                for name, values in (("gate", x), ("up", x), ("down", activate(gate) * up)):
                    key = f"{b}ffn_{name}_exps.weight"
                    want[key] = want[key] + (np.arange(4) == e)[:, None] * values**2
        return whole(h, w, b, m, activate)

    monkeypatch.setattr(reference, "mixture", recorded)
    tokenizer = Tokenizer(path)
    ids = tokenizer.encode(text.read_text(encoding="utf-8"), parse_special=False, add_special=True)
    with open_gguf(path) as file:
        for window in cut(ids[:TOKENS], CTX, tokenizer):
            reference.forward(file, read_config(file), window.tolist(), np.float16)
    out = path.with_suffix(".imatrix")
    assert run(path, out, "--text", text, "--tokens", TOKENS, "--ctx", CTX).exit_code == 0
    found = {t.name: t.data for t in gguf_package.GGUFReader(out).tensors}
    assert len(want) == 2 * 3
    for name, sums in want.items():
        assert np.abs(found[f"{name}.in_sum2"] - sums).max() <= F32_BOUND * sums.max(), name


@pytest.mark.parametrize("arch", ["glm4moe", "gpt-oss"])
def test_experts_by_themselves(arch: str, tmp_path: Path, text: Path):
    """Each token enters its experts, and these only; what enters them is what enters the router."""
    path = tiny_experts(tmp_path / "tiny.gguf", arch, seed=4)
    out = path.with_suffix(".imatrix")
    result = run(path, out, "--text", text, "--tokens", TOKENS, "--ctx", CTX)
    assert result.exit_code == 0, result.stderr
    tensors = {t.name: t.data for t in gguf_package.GGUFReader(out).tensors}
    sizes = Sizes()
    for layer in range(1, sizes.layers):
        router = tensors[f"blk.{layer}.ffn_gate_inp.weight.in_sum2"][0]
        counts = {
            n: tensors[f"blk.{layer}.ffn_{n}_exps.weight.counts"].ravel() for n in ("gate", "up", "down")
        }
        sums = {n: tensors[f"blk.{layer}.ffn_{n}_exps.weight.in_sum2"] for n in counts}
        assert (counts["gate"] == counts["down"]).all() and counts["up"].sum() == 200 * sizes.used
        assert sums["down"].shape == (sizes.experts, sizes.width) and len(set(counts["up"])) > 1
        np.testing.assert_array_equal(sums["gate"], sums["up"])
        np.testing.assert_allclose(sums["gate"].sum(0), sizes.used * router, rtol=1e-5)
        assert ((sums["down"] == 0).all(1) == (counts["down"] == 0)).all()
    command = ["quantize", str(path), str(tmp_path / "q.gguf"), "--type", "Q4_0", "--imatrix", str(out)]
    quantized = CliRunner().invoke(cli.main, command, catch_exceptions=False)
    assert quantized.exit_code == 0, quantized.stderr
    told = [line for line in quantized.stdout.splitlines() if "has nothing about " in line]
    unknown = re.findall(r"blk\.(\d+)\.\w+_exps\.", "".join(told))
    assert told and all(int(layer) >= sizes.layers for layer in unknown), "those that no token runs through"


def test_the_file_is_laid_out_as_upstreams(tmp_path: Path):
    sums = {"blk.1.b.weight": np.array([4.0, 0.0, 8.0]), "blk.0.a.weight": np.arange(40.0)}
    routed = np.arange(12.0).reshape(3, 4)
    both, counts = sums | {"blk.2.c_exps.weight": routed}, {"blk.2.c_exps.weight": np.array([2, 0, 1])}
    save_imatrix(tmp_path / "out.gguf", both, counts, 4, ["täxt.txt"], 2)
    means = load_imatrix(tmp_path / "out.gguf")
    assert means.pop("blk.2.c_exps.weight").tolist() == [0, 0.5, 1, 1.5, 1, 1, 1, 1, 8, 9, 10, 11]
    assert {n: m.tolist() for n, m in means.items()} == {n: (s / 4).tolist() for n, s in sums.items()}
    reader = gguf_package.GGUFReader(tmp_path / "out.gguf")
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.datasets"].contents() == ["täxt.txt"]
    assert (
        reader.fields["imatrix.chunk_count"].contents() == reader.fields["imatrix.chunk_size"].contents() == 2
    )
    order = [t.name for t in reader.tensors]
    assert order[:2] == ["blk.0.a.weight.in_sum2", "blk.0.a.weight.counts"]
    assert [p.name for p in tmp_path.iterdir()] == ["out.gguf"]


def test_the_quantizer_takes_it(tmp_path: Path, text: Path):
    path = tiny_model(tmp_path / "f32.gguf", n_embd=256, n_ff=256, head_dim=64, n_layers=1)
    collected(path, text)
    for name, options in (("plain", []), ("weighted", ["--imatrix", str(path.with_suffix(".imatrix"))])):
        command = ["quantize", str(path), str(tmp_path / f"{name}.gguf"), "--type", "Q4_K_M", *options]
        result = CliRunner().invoke(cli.main, command, catch_exceptions=False)
        assert result.exit_code == 0, result.stderr
        assert "nothing about blk." not in result.stdout + result.stderr
    with open_gguf(tmp_path / "plain.gguf") as plain, open_gguf(tmp_path / "weighted.gguf") as weighted:
        different = [
            n for n in plain.tensors if not np.array_equal(plain.tensor_data(n), weighted.tensor_data(n))
        ]
    assert {n for n in plain.tensors if n.startswith("blk.") and "norm" not in n} <= set(different)


def test_what_goes_wrong_is_one_line(tmp_path: Path, text: Path):
    model, out = tiny_model(tmp_path / "tiny.gguf"), tmp_path / "out.gguf"
    assert_one_line(run(model, model, "--text", text), "tiny.gguf", "exists", "--force")
    assert_one_line(run(model, tmp_path, "--text", text), "not a file in an existing folder")
    assert_one_line(run(model, tmp_path / "none" / "out", "--text", text), "not a file in an existing folder")
    assert_one_line(run(model, out, "--text", tmp_path / "none.txt"), "--text", "none.txt")
    assert_one_line(run(tmp_path / "none.gguf", out, "--text", text), "none.gguf", "no such file")
    assert_one_line(run(model, out, "--text", text, "--ctx", 1000), "--ctx 1000", "512")
    assert not out.exists()


@pytest.mark.parametrize("extra", [(), ("--text", "t", "--tokens", 100), ("--text", "t", "--ctx", 0)])
def test_bad_usage_is_exit_code_2(extra: tuple[object, ...]):
    assert run("a.gguf", "b.gguf", *extra).exit_code == 2


def test_an_old_file_is_replaced_only_when_told(tmp_path: Path, text: Path):
    model, out = tiny_model(tmp_path / "tiny.gguf"), tmp_path / "out.gguf"
    out.write_text("old")
    result = run(model, out, "--text", text, "--tokens", 64, "--ctx", 64, "--force")
    assert result.exit_code == 0, result.stderr
    assert len(load_imatrix(out)) == 14
