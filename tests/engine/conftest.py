"""Quantized models of a real size, made once and shared."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import tiny_model

from quant.gguf import open_gguf

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"n_layers": 12, "n_embd": 768, "n_ff": 2048, "n_heads": 12, "n_kv_heads": 4, "head_dim": 64}


@pytest.fixture(scope="session")
def f16_path(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """113 million random weights in rows of 768 and 2,048, with a real vocabulary."""
    with open_gguf(smollm2_path) as file:
        vocabulary = {
            key: _plain(value) for key, value in file.metadata.items() if key.startswith("tokenizer.ggml.")
        }
    path = tmp_path_factory.mktemp("random") / "f16.gguf"
    yield tiny_model(path, weight_type="F16", embedding_type="F16", metadata=vocabulary, **SIZES)
    path.unlink()


@pytest.fixture(scope="session")
def quantized(f16_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """The file that `hetero quantize` makes of it, by the name of the type."""
    made: dict[str, Path] = {}

    def make(type_name: str) -> Path:
        if type_name not in made:
            made[type_name] = out = tmp_path_factory.mktemp("quantized") / f"{type_name}.gguf"
            command = [
                sys.executable,
                "-m",
                "cli",
                "quantize",
                str(f16_path),
                str(out),
                type_name,
                "--strict",
            ]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
        return made[type_name]

    yield make
    for path in made.values():
        path.unlink()


def _plain(value: Any) -> Any:
    """A metadata value as the writer takes it."""
    element = getattr(value, "element", None)
    return np.array(value, np.int32) if element == "i32" else list(value) if element else value
