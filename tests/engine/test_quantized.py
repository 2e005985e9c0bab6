"""Files that `hetero quantize` made, computed by our stage and by libllama."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from driver import Driver
from gguf_tools import Raw, rewrite
from reference import forward
from tiny_models import libllama_logits, tiny_model

from quant.blocks import dequantize
from quant.gguf import open_gguf
from quant.types import GGML_TYPES

ROOT = Path(__file__).resolve().parents[2]
# Both sides multiply the same weights by activations rounded to 8 bits, which through eight layers moves
# the logits by 3.6 % (of norms) from the exact ones, and libllama with flash attention as far from libllama
# without. We may be no farther from either than that, with this much room for chance.
SPREAD_ROOM = 1.25
ROUNDED_ACTIVATIONS_BOUND = 0.06  # in case all three were to go wrong together
TOP1 = 0.9


@pytest.fixture(scope="module")
def f16_path(tmp_path_factory) -> Path:
    """25 million random weights in rows of 512 and 1,536."""
    sizes = {"n_layers": 8, "n_embd": 512, "n_ff": 1536, "n_heads": 8, "n_kv_heads": 4, "head_dim": 64}
    types = {"weight_type": "F16", "embedding_type": "F16", "tied": False}
    return tiny_model(tmp_path_factory.mktemp("random") / "f16.gguf", **sizes, **types)


def exact_logits(path: Path, driver: Driver, ids: list[int], tmp_path: Path) -> np.ndarray:
    """Of the decoded weights, in float64 but for the f16 KV cache."""
    with open_gguf(path) as file:
        weights: dict[str, Raw | None] = {}
        for t in file.tensors.values():
            values = dequantize(t.type, file.tensor_data(t.name), t.shape[::-1])
            weights[t.name] = Raw("F32", t.shape, values.astype("<f4").tobytes())
    with open_gguf(rewrite(path, tmp_path / "f32.gguf", {}, weights)) as file:
        return forward(file, driver.config, ids, np.float16)


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("type_name", ["Q5_K_M", "Q6_K"])
def test_logits_of_quantized_models(type_name: str, f16_path: Path, tmp_path: Path):
    out = tmp_path / "quantized.gguf"
    command = [sys.executable, "-m", "cli", "quantize", str(f16_path), str(out), "--type", type_name]
    subprocess.run([*command, "--strict"], cwd=ROOT, check=True, capture_output=True, timeout=60)
    ids = [int(i) for i in np.random.default_rng(0).integers(3, 300, 100)]
    driver = Driver(out)
    types = {GGML_TYPES[t.type].name for t in driver.gguf.tensors.values() if len(t.shape) > 1}
    assert types == ({"Q5_K", "Q6_K"} if type_name == "Q5_K_M" else {"Q6_K"})
    ours, exact = driver.logits(ids), exact_logits(out, driver, ids, tmp_path)
    driver.close()
    plain, flash = libllama_logits(out, ids), libllama_logits(out, ids, flash=True)
    spread = relative(flash, plain)
    print(f"ours to libllama {relative(ours, plain):.4f}, libllama to itself {spread:.4f}")
    print(f"to exact: ours {relative(ours, exact):.4f}, libllama {relative(plain, exact):.4f}")
    assert relative(ours, plain) <= min(SPREAD_ROOM * spread, ROUNDED_ACTIVATIONS_BOUND)
    assert relative(ours, exact) <= SPREAD_ROOM * relative(plain, exact)
    assert (ours.argmax(1) == plain.argmax(1)).mean() >= TOP1
