"""Thousands of damaged headers: each refused in a line or loaded, in no time, and no process dies of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf_tools import write_gguf
from scale import scaled
from tiny_models import tiny_model
from vocabularies import VOCABULARIES

TESTS = Path(__file__).parent.parent
SMALL = {"n_layers": 1, "n_embd": 32, "n_heads": 2, "n_kv_heads": 1, "n_ff": 32}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def fuzz(folder: Path, seed: int, count: int, files: list[Path], patience: float) -> list[dict[str, Any]]:
    """What became of each damaged file, having checked that the process outlived them all.

    `patience`: seconds for each on a busy machine, before it counts as hanging.
    """
    paths = os.pathsep.join((str(TESTS.parent), str(TESTS)))
    done = subprocess.run(
        [sys.executable, str(TESTS / "gguf_fuzz.py"), str(folder), str(seed), str(count), *map(str, files)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60 + patience * count * len(files),
        check=False,
    )
    assert done.returncode == 0, f"died at {done.stderr[-3000:]}"
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == count * len(files)
    for one in found:
        assert [r for r in one["refusals"] if "\n" in r or "damaged.gguf: " not in r] == [], one
    return found


@pytest.fixture(scope="module")
def small_files(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("small")
    files = [
        tiny_model(folder / "llama.gguf", **SMALL, chat_template=TEMPLATE),
        tiny_model(folder / "gemma3.gguf", "gemma3", **SMALL),
        tiny_model(folder / "qwen3moe.gguf", "qwen3moe", n_experts=4, **SMALL),
    ]
    for kind, vocabulary in VOCABULARIES.items():
        values = {"general.architecture": "llama", **vocabulary()}
        files.append(write_gguf(folder / f"vocabulary-{kind}.gguf", values, {}))
    return files


def test_small_files(small_files: list[Path], tmp_path: Path):
    found = fuzz(tmp_path, 1, scaled(120, 1250), small_files, 0.2)
    assert max(one["seconds"] for one in found) < 1  # of computing, whoever else computes
    assert max(one["grown"] for one in found) < 50e6
    refused = sum(1 for one in found if one["refusals"] and one["file"] == "llama.gguf")
    assert 0.3 < refused / (len(found) / len(small_files)) < 0.98  # or the damage is too small or too great


def test_real_headers(smollm2_path: Path, gemma3_path: Path, tmp_path: Path):
    found = fuzz(tmp_path, 2, scaled(4, 100), [smollm2_path, gemma3_path], 10)
    assert max(one["seconds"] for one in found) < 5  # a quarter of a million tokens take half a second
    assert max(one["grown"] for one in found) < 400e6
