"""What MODEL may be, and that a name never leaves the model folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetero import models
from hetero.model_folder import ModelError, list_names, resolve_name
from hetero.models import resolve

GGUF = b"GGUF" + bytes(20)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    root = tmp_path / "models"
    (root / "nested").mkdir(parents=True)
    (root / "tiny.gguf").write_bytes(GGUF)
    (root / "nested" / "inner.gguf").write_bytes(GGUF)
    (tmp_path / "x").write_bytes(GGUF)
    (tmp_path / "x.gguf").write_bytes(GGUF)
    monkeypatch.chdir(tmp_path / "models" / "nested")
    monkeypatch.setenv("HETERO_MODELS", str(root))
    return root


def test_paths(folder: Path):
    assert resolve(str(folder / "tiny.gguf")).path == folder / "tiny.gguf"
    assert resolve(str(folder / "nested")).name == "inner"
    assert resolve("../../x").name == "x"  # an explicit path may be any file
    assert resolve("inner.gguf").path == Path("inner.gguf")


def test_names(folder: Path):
    assert resolve("tiny").path == folder / "tiny.gguf"
    assert resolve("nested").path == folder / "nested" / "inner.gguf"
    assert resolve("inner").path == folder / "nested" / "inner.gguf"
    assert list_names(folder) == ["inner", "tiny"]


def test_split_models(folder: Path):
    parts = [f"big-{i:05d}-of-00002.gguf" for i in (1, 2)]
    for name in parts:
        (folder / name).write_bytes(GGUF)
    assert list_names(folder) == ["big", "inner", "tiny"]
    assert resolve("big").path == resolve("big-00001-of-00002").path == folder / parts[0]
    assert resolve("big").name == resolve(str(folder / parts[0])).name == "big"
    (folder / "nested" / "inner.gguf").unlink()
    for name in parts:
        (folder / name).rename(folder / "nested" / name)
    assert resolve("nested").path == resolve("big").path == folder / "nested" / parts[0]
    (folder / "nested" / "other.gguf").write_bytes(GGUF)
    with pytest.raises(ModelError, match=r"exactly one \.gguf file or split model, not 2"):
        resolve("nested")


def test_default_is_the_packaged_model(smollm2_path):
    assert resolve(None).path == smollm2_path
    assert resolve(None).name == "SmolLM2-135M-Instruct.Q4_1"


def test_default_not_installed(monkeypatch):
    monkeypatch.setattr(models, "DEFAULT_PACKAGE", "no_such_package_at_all")
    with pytest.raises(ModelError, match=r'pip install "hetero\[default-model\]"'):
        resolve(None)


HOSTILE = [
    "../x",
    "..\\x",
    "../../x",
    "/etc/passwd",
    "a/../../x",
    "%2e%2e/x",
    "x\0.bin",
    "",
    ".",
    "..",
    "CON",
    "con.gguf",
    "x" * 300,
    "C:x",
    "tiny.",
    " tiny",
    "*",
    "nested/inner",
    "tiny\n",
    ".hidden",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_resolve_to_nothing(folder: Path, name: str):
    (folder / ".hidden.gguf").write_bytes(GGUF)
    assert resolve_name(name, folder) is None


@pytest.mark.parametrize("name", [n for n in HOSTILE if n not in ("/etc/passwd", "../../x", ".", "..")])
def test_hostile_values_are_one_clear_line(folder: Path, name: str):
    with pytest.raises(ModelError) as caught:
        resolve(name)
    assert len(str(caught.value).strip()) > 10


@pytest.mark.skipif(os.name == "nt", reason="symlinks need a privilege on Windows")
def test_symlinks_out_of_the_folder_are_not_followed_for_names(folder: Path, tmp_path: Path):
    (folder / "ok.gguf").symlink_to(tmp_path / "x")
    (folder / "dir").symlink_to(tmp_path)
    (folder / "inside.gguf").symlink_to(folder / "tiny.gguf")
    (folder / "sub").mkdir()
    (folder / "sub" / "y.gguf").symlink_to(tmp_path / "x")
    assert [resolve_name(n, folder) for n in ("ok", "ok.gguf", "dir", "sub")] == [None] * 4
    assert resolve_name("inside", folder) is not None
    assert set(list_names(folder)) >= {"tiny", "inside"}
    assert not {"ok", "dir"} & set(list_names(folder))
    linked = tmp_path / "link"
    linked.symlink_to(folder)
    assert resolve_name("tiny", linked) is not None  # the folder itself may be one: the user chose it


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("hf:owner", ["'hf:owner'", "hf:owner/repo:QUANT"]),
        ("missing.gguf", ["missing.gguf", "no such file"]),
        ("missing", ["missing", "inner, tiny"]),
        ("..", ["exactly one .gguf", "not 0"]),
    ],
)
def test_clear_errors(folder: Path, tmp_path: Path, monkeypatch, model: str, words: list[str]):
    if model == "..":
        (tmp_path / "empty" / "deep").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "empty" / "deep")
    with pytest.raises(ModelError) as caught:
        resolve(model)
    assert [w for w in words if w not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_not_a_gguf(tmp_path: Path):
    for content in (b"", b"GGU", b"PK\3\4 a zip"):
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(ModelError, match="not a GGUF"):
            resolve(str(tmp_path / "m.gguf"))


def test_two_models_in_a_folder_are_ambiguous(folder: Path):
    (folder / "nested" / "second.gguf").write_bytes(GGUF)
    with pytest.raises(ModelError, match="exactly one"):
        resolve(str(folder / "nested"))


def test_a_name_in_two_folders_is_ambiguous(folder: Path):
    (folder / "other").mkdir()
    (folder / "other" / "inner.gguf").write_bytes(GGUF)
    with pytest.raises(ModelError, match="several folders have a model of this name"):
        resolve("inner")
    (folder / "inner.gguf").write_bytes(GGUF)
    assert resolve("inner").path == folder / "inner.gguf"  # what lies in the model folder itself comes first
