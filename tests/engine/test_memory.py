"""A loaded model takes as much memory as its file, its KV cache and its compute buffer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf_tools import Raw, write_gguf
from matmul_tools import random_rows

from backends.cpu import matmul, packed
from backends.cpu.packed import PackedWeights, packable
from quant.gguf import open_gguf
from quant.types import GGML_TYPES

BENCH = Path(__file__).resolve().parents[1] / "bench" / "load_time.py"
FILE_BOUND = 1.05  # what our layout of the K formats adds is below 3 %
KERNELS_BOUND = 24 << 20  # their code, loaded; what else the first load leaves behind is no bigger
has_kernels = pytest.mark.skipif(not matmul.supported(8, 32, 32), reason="no kernels for this CPU")


def measured(path: Path) -> dict:
    """What tests/bench/load_time.py finds in a process that does not compile."""
    command = [sys.executable, str(BENCH), str(path), "--rounds", "0", "--threads", "2", "--json"]
    for _ in range(2):
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        found = json.loads(done.stdout)
        if not found["compiled"]:
            break
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="resident size means something else there")
@pytest.mark.parametrize("model", ["SmolLM2", "Q5_K_M", "Q6_K"])
def test_resident_size(model: str, smollm2_path: Path, quantized: Callable[[str], Path]):
    found = measured(smollm2_path if model == "SmolLM2" else quantized(model))
    print({name: round(value / 2**20, 1) for name, value in found.items() if name != "model"})
    assert not found["compiled"]
    allowed = FILE_BOUND * found["file"] + found["kv"] + found["compute"]
    assert 0.9 * found["file"] < found["model_rss"] <= allowed
    assert found["weights"] <= FILE_BOUND * found["file"]
    assert found["kernels_rss"] <= KERNELS_BOUND


@has_kernels
@pytest.mark.parametrize("threads", [1, 3])
def test_packed_in_shares(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The bytes are those of packing each matrix in one go, however many threads and shares there are."""
    rng = np.random.default_rng(0)
    shapes = {"Q5_K": (75, 512), "Q6_K": (256, 256), "Q8_0": (33, 96), "Q4_1": (640, 64)}
    ids = {f.name: i for i, f in GGML_TYPES.items()}
    raws = {name: random_rows(rng, ids[name], m, k) for name, (m, k) in shapes.items()}
    tensors = {name: Raw(name, shapes[name][::-1], raw.tobytes()) for name, raw in raws.items()}
    monkeypatch.setattr(packed, "SHARE_BYTES", 10_000)
    seen: list[int] = []
    with open_gguf(write_gguf(tmp_path / "a.gguf", {}, tensors)) as file:
        names = [name for name in shapes if packable(file, name)]
        weights = PackedWeights(file, names, threads, seen.append)
        assert seen == [file.tensors[name].nbytes for name in names] and len(names) > 1
    assert weights.nbytes == sum(weights[name].data.nbytes for name in names)
    for name in names:
        (m, k), data = shapes[name], weights[name].data
        want = np.zeros(len(data) + 64, np.uint8)
        want = want[-want.ctypes.data % 64 :][: len(data)]
        matmul.pack(ids[name], raws[name].ctypes.data, m, k, want.ctypes.data)
        assert data.ctypes.data % 64 == 0 and data.tobytes() == want.tobytes()


@has_kernels
def test_no_packed_weights_at_all(tmp_path: Path):
    with open_gguf(write_gguf(tmp_path / "a.gguf", {}, {"t": np.zeros((2, 32), np.float32)})) as file:
        assert PackedWeights(file, [], 2).nbytes == 0
