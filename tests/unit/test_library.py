"""`hetero pull` and `hetero models`, as a user and a program meet them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from gguf_tools import head, kv, rewrite
from hub_tools import Hub, running_hub
from llama_models import FAMILIES as LLAMA_FAMILIES
from tiny_models import tiny_model

import cli


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETERO_MODELS", str(tmp_path / "models"))
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        yield hub


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli.main, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done.exit_code, done.stdout, done.stderr


def listed(*options: str) -> dict[str, dict]:
    code, out, _ = run("models", "--json", *options)
    assert code == 0
    return {entry["name"]: entry for entry in json.loads(out)}


def test_a_model_is_pulled_listed_and_found_by_name(folder: Path, hub: Hub, tmp_path: Path):
    model = tiny_model(tmp_path / "source.gguf", n_layers=1)
    hub.repos["me/tiny-GGUF"] = {"tiny-F32.gguf": model.read_bytes(), "tiny-Q8_0.gguf": b"GGUF"}
    code, out, err = run("pull", "hf:me/tiny-GGUF:F32")
    path = folder / "me--tiny-GGUF" / "tiny-F32.gguf"
    assert (code, out) == (0, f"{path}\nServe it: hetero serve tiny-F32\n")
    assert "downloading tiny-F32.gguf" in err
    entry = listed()["tiny-F32"]
    assert entry["path"] == str(path) and entry["fits"] is True and entry["engine"] == "native"
    code, out, _ = run("plan", "tiny-F32", "--json", "--no-calibrate")
    assert code == 0 and json.loads(out)["model"] == str(path)
    code, out, _ = run("pull", "hf:me/tiny-GGUF:F32", "--json")
    assert (code, json.loads(out)) == (0, {"name": "tiny-F32", "path": str(path)})
    assert len(hub.downloads) == 1  # it was there already


def test_a_model_is_pulled_by_whoever_wants_to_serve_it(folder: Path, hub: Hub, tmp_path: Path):
    hub.repos["me/tiny"] = {"tiny.gguf": tiny_model(tmp_path / "source.gguf", n_layers=1).read_bytes()}
    code, out, _ = run("plan", "hf:me/tiny", "--json", "--no-calibrate")
    assert code == 0 and json.loads(out)["model"] == str(folder / "me--tiny" / "tiny.gguf")


def test_pulling_what_is_not_there(folder: Path, hub: Hub):
    hub.error = (404, "RepoNotFound")
    for name, words in (("hf:me/nothing", "has no such model"), ("nothing", "must be hf:owner/repo")):
        code, out, err = run("pull", name)
        assert (code, out) == (1, "") and words in err
        assert err.splitlines()[-1].startswith("hetero: ")


def test_an_interrupted_pull(folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    hub.repos["me/tiny"] = {"tiny.gguf": b"GGUF" * 100}
    monkeypatch.setattr("hetero.hub._download_part", interrupted)
    code, _, err = run("pull", "hf:me/tiny")
    assert code == 1 and "goes on where it stopped" in err


def test_what_can_and_what_cannot_be_served(folder: Path, tmp_path: Path):
    good = tiny_model(folder / "good.gguf", n_layers=1)
    rewrite(good, folder / "broken.gguf", {"llama.block_count": 7})
    rewrite(good, folder / "eyes.gguf", {"general.architecture": "clip"})
    LLAMA_FAMILIES["stablelm"](folder / "other.gguf")
    rewrite(good, folder / "pictures.gguf", {"llama.rope.dimension_sections": [4, 2, 2, 0]})
    (folder / "g01.gguf").write_bytes(head(0, 1) + kv("", "u8", b"\x01"))
    found = listed()
    assert {
        "good",
        "broken",
        "eyes",
        "g01",
        "other",
        "pictures",
        "SmolLM2-135M-Instruct.Q4_1",
    } == found.keys()
    assert found["good"] | {"path": ""} == {
        "name": "good",
        "path": "",
        "family": "llama",
        "n_params": 56960,
        "size_bytes": good.stat().st_size,
        "quantization": "F32",
        "context": 512,
        "engine": "native",
        "fits": True,
        "note": "",
    }
    assert found["broken"]["engine"] == "none" and found["broken"]["fits"] is None
    assert "blk.1." in found["broken"]["note"] and "is missing; download" in found["broken"]["note"]
    assert (found["other"]["engine"], found["other"]["fits"]) == ("fallback", True)
    assert (found["pictures"]["engine"], found["pictures"]["fits"]) == ("fallback", True)
    assert found["eyes"]["engine"] == "none" and "vision file" in found["eyes"]["note"]
    assert found["g01"]["note"].startswith("unreadable: the key of metadata entry 0")
    assert found["SmolLM2-135M-Instruct.Q4_1"]["fits"] is True
    too_much = listed("--kv-tokens", "1000000000000")["good"]
    assert too_much["fits"] is False and "memory" in too_much["note"]


def test_the_table(folder: Path):
    tiny_model(folder / "good.gguf", n_layers=1)
    code, out, _ = run("models")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert lines[0] == ["name", "family", "parameters", "size", "quant", "context", "fits", "engine"]
    assert lines[2][:2] == ["good", "llama"] and lines[2][-2:] == ["yes", "native"]
    assert out.endswith(f"model folder: {folder}\n")


def test_families():
    code, out, _ = run("models", "--families", "--json")
    families = {one["family"]: one["models"] for one in json.loads(out)}
    assert code == 0 and {"llama", "qwen3", "gemma3"} <= families.keys() and "SmolLM" in families["llama"]
    code, out, _ = run("models", "--families")
    assert code == 0 and all(family in out for family in families)
