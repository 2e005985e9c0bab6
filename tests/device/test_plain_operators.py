"""A stage in plain ggml operators computes what the CPU's own kernels do.

Its parts, views, gathers and copies are those of any other device; here they run on ggml's CPU kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.driver import BLOCK, Driver
from tiny_models import tiny_model

from backends.ggml import layers
from backends.ggml.layers import DeviceLayers
from backends.ggml.stage import GgmlStage
from hetero.batch import BlockCopy

TINY: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama"},
    "one KV head": {"arch": "llama", "n_kv_heads": 1, "head_dim": 32},
    "rope factors": {"arch": "llama", "rope_freqs": True, "tied": False},
    "windows": {"arch": "gemma3", "n_layers": 3, "sliding_window": 24, "sliding_window_pattern": 3},
}
# Relative error of norms. ggml's flash attention on the CPU also rounds queries and sums to f16.
BOUND = 4e-3


class PlainStage(GgmlStage):
    def _kind(self) -> type[DeviceLayers]:
        return DeviceLayers


@pytest.fixture(scope="module", params=sorted(TINY))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("plain") / "tiny.gguf", **TINY[request.param])


@pytest.fixture(params=["flash", "products"])
def pair(path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """A stage with our kernels and one without, with and without ggml's fused attention."""
    if request.param == "products":
        monkeypatch.setattr(layers, "can_flash_attend", lambda *shape: False)
    ours, plain = Driver(path, max_tokens=128), Driver(path, max_tokens=128, kind=PlainStage)
    assert plain.stage._layers.flash == (request.param == "flash")
    yield ours, plain
    ours.close()
    plain.close()


def close_to(got: np.ndarray, want: np.ndarray) -> bool:
    return bool(np.linalg.norm(got - want) <= BOUND * np.linalg.norm(want))


def test_a_prompt_in_chunks_of_any_size(pair: tuple[Driver, Driver]) -> None:
    ours, plain = pair
    ids = np.random.default_rng(1).integers(3, 300, 120).tolist()
    want = ours.logits(ids, chunk=120)
    for chunk in (1, 16, 50, 120):
        assert close_to(plain.logits(ids, chunk, seed=chunk), want)


def test_sequences_of_all_lengths_in_one_step(pair: tuple[Driver, Driver]) -> None:
    """Chunks and single tokens, more streams than are attended one by one, scattered and in one piece."""
    ours, plain = pair
    rng = np.random.default_rng(2)
    ids = rng.integers(3, 300, 200).tolist()
    lengths = [3, 40, 17, 100, 64, 5, 33]
    blocks = rng.permutation(np.arange(1, 150))
    tables, at = [], 0
    for i, length in enumerate(lengths):
        need = -(-(length + 20) // BLOCK)
        consecutive = np.arange(150, 150 + need)
        tables.append(consecutive if i == 3 else blocks[at : at + need])
        at += need
    steps = [
        [(t, 0, ids[:n]) for t, n in zip(tables[:4], lengths[:4], strict=True)][:2],
        [(t, 0, ids[:n]) for t, n in zip(tables[2:], lengths[2:], strict=True)][:2],
        [(t, 0, ids[:n]) for t, n in zip(tables[4:], lengths[4:], strict=True)],
        [(t, n, ids[n : n + (20 if n == 40 else 1)]) for t, n in zip(tables, lengths, strict=True)],
        [(t, n + 1, ids[n + 1 : n + 4]) for t, n in zip(tables, lengths, strict=True) if n != 40],
    ]
    for step in steps:
        for got, want in zip(plain.step(step), ours.step(step), strict=True):
            assert close_to(got, want)


def test_blocks_are_copied_on_the_device(pair: tuple[Driver, Driver]) -> None:
    ours, plain = pair
    ids = np.random.default_rng(3).integers(3, 300, 40).tolist()
    want = ours.logits(ids, chunk=40)[-1]
    table = np.arange(5, 8)
    plain.step([(table, 0, ids[:39])])
    copies = [BlockCopy(g, 7, 20) for g in range(plain.num_groups)]
    (got,) = plain.step([(np.array([5, 6, 20]), 39, ids[39:])], copies)
    assert close_to(got[-1], want)


def test_rows_of_the_embedding_come_from_the_host_where_the_device_has_no_lookup(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.random.default_rng(4).integers(3, 300, 30).tolist()
    plain = Driver(path, kind=PlainStage)
    want = plain.logits(ids)
    monkeypatch.setattr(layers, "can_look_up", lambda *_: False)
    host = Driver(path, kind=PlainStage)
    np.testing.assert_array_equal(host.logits(ids), want)
    plain.close()
    host.close()


def test_a_weight_that_the_device_cannot_multiply_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "can_multiply", lambda *_: False)
    with pytest.raises(layers.DeviceError, match=r"cannot multiply by \S+weight, which is F32"):
        Driver(path, kind=PlainStage)


def test_what_was_in_place_and_what_was_gathered_is_counted(path: Path) -> None:
    plain = Driver(path, kind=PlainStage)
    plain.step([(np.arange(1, 5), 0, [5, 6, 7])])
    assert plain.stage.counters() == {"attended_in_place": 1, "attended_gathered": 0}
    plain.step([(np.array([9, 4]), 0, list(range(5, 25)))])
    assert plain.stage.counters() == {"attended_in_place": 1, "attended_gathered": 1}
    plain.close()
