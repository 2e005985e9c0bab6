"""A stage in plain ggml operators computes what the CPU's own kernels do.

Its parts, views, gathers and copies are those of any other device; here they run on ggml's CPU kernels.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from engine.driver import BLOCK, Driver
from engine.reference import Rounded, forward
from tiny_models import tiny_model

from backends.ggml import capabilities, endpoint, layers
from backends.ggml.layers import DeviceLayers
from backends.ggml.lib import TYPE_F16, ggml
from backends.ggml.paged import KINDS
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
UNPACKED_BOUND = 2e-3  # less than what the formats themselves change
Q8_BOUND = 6e-3  # beside keys in q8_0, queries are rounded to it too


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


def close_to(got: np.ndarray, want: np.ndarray, bound: float = BOUND) -> bool:
    return bool(np.linalg.norm(got - want) <= bound * np.linalg.norm(want))


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


def test_an_operator_that_the_device_lacks_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before ggml ends the process over it."""
    monkeypatch.setattr(layers, "unsupported", lambda device, graph: "SWIGLU")
    with pytest.raises(layers.DeviceError, match="device CPU: has no operator SWIGLU, which family "):
        Driver(path, kind=PlainStage)


def test_all_operators_of_a_graph_are_asked_for(path: Path) -> None:
    plain = Driver(path, kind=PlainStage)
    (graph,) = plain.stage._graphs.values()
    asked = []
    lib = SimpleNamespace(
        graph_n_nodes=ggml().graph_n_nodes,
        graph_node=ggml().graph_node,
        op_desc=ggml().op_desc,
        backend_dev_supports_op=lambda _, node: asked.append(node) or len(asked) < 5,
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(capabilities, "ggml", lambda: lib)
        assert capabilities.unsupported(plain.stage.device, graph.builder.graph)
    assert len(asked) == 5
    assert capabilities.unsupported(plain.stage.device, graph.builder.graph) is None
    plain.close()


def test_what_was_in_place_and_what_was_gathered_is_counted(path: Path) -> None:
    plain = Driver(path, kind=PlainStage)
    plain.step([(np.arange(1, 5), 0, [5, 6, 7])])
    assert plain.stage.counters() == {"attended_in_place": 1, "attended_gathered": 0}
    plain.step([(np.array([9, 4]), 0, list(range(5, 25)))])
    assert plain.stage.counters() == {"attended_in_place": 1, "attended_gathered": 1}
    plain.close()


WAYS = {
    "as it is": lambda device, *shape: True,
    "made f16": lambda device, *shape: shape[4:6] == (TYPE_F16, TYPE_F16),  # of keys, of values
    "made f32": lambda *_: False,
}
KEPT = [("q8_0", "q8_0"), ("q8_0", "f16"), ("f16", "q8_0")]


def through(kind: str) -> Rounded:
    """What is left of values [..., dim] that were kept so."""
    if kind == "f16":
        return lambda x: x.astype(np.float16).astype(np.float64)
    kind_id = gguf.GGMLQuantizationType.Q8_0
    return lambda x: gguf.quants.dequantize(gguf.quants.quantize(x.astype(np.float32), kind_id), kind_id)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of two blocks."""
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    return tiny_model(path, **TINY["windows"], n_heads=2, n_kv_heads=1, head_dim=64)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kept", KEPT, ids="-".join)
def test_keys_and_values_in_blocks(
    wide: Path, way: str, kept: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every way to attend them: as the device has it, or unpacked first."""
    monkeypatch.setattr(layers, "can_flash_attend", WAYS[way])
    plain = Driver(wide, max_tokens=128, threads=1, kind=PlainStage, kv_types=kept)
    held = plain.stage._layers
    assert (held.flash, held.unpacks) == (way != "made f32", way != "as it is")
    rng = np.random.default_rng(7)
    ids = rng.integers(3, 300, 100).tolist()
    want = forward(plain.gguf, plain.config, ids, kept=(through(kept[0]), through(kept[1])))
    bound = Q8_BOUND if way == "as it is" and kept[0] == "q8_0" else UNPACKED_BOUND
    for chunk in (7, 60):
        got = plain.logits(ids, chunk, seed=chunk)
        assert close_to(got, want, bound)
    tables = [np.arange(40, 47), rng.permutation(np.arange(50, 57))]
    plain.step([(t, 0, ids[:60]) for t in tables])
    for got in plain.step([(t, 60, ids[60:]) for t in tables]):
        assert close_to(got, want[60:], bound)
    assert (plain.stage.counters()["attended_in_place"] > 0) == (way == "as it is")
    plain.close()


def test_the_pools_take_what_the_formats_take(wide: Path) -> None:
    sizes = {}
    for kept in [("f16", "f16"), *KEPT]:
        plain = Driver(wide, kind=PlainStage, kv_types=kept)
        sizes[kept] = plain.stage.memory()["kv"]
        plain.close()
    whole = sizes["f16", "f16"]
    assert sizes["q8_0", "q8_0"] == pytest.approx(34 / 64 * whole, rel=0.01)
    assert sizes["q8_0", "f16"] == sizes["f16", "q8_0"] == pytest.approx(49 / 64 * whole, rel=0.01)


def test_formats_that_a_device_lacks_are_named(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(layers.DeviceError, match="device CPU: cannot store keys and values as fp8"):
        Driver(wide, kind=PlainStage, kv_types=("fp8", "fp8"))
    monkeypatch.setattr(layers, "can_look_up", lambda *_: False)
    monkeypatch.setattr(layers, "can_flash_attend", WAYS["made f16"])
    with pytest.raises(layers.DeviceError, match="cannot attend keys or values kept as q8_0"):
        Driver(wide, kind=PlainStage, kv_types=("q8_0", "f16"))


def test_drivers_behind_rpc_are_not_trusted_with_two_formats(wide: Path) -> None:
    """It says yes to everything, and ends the process where that was wrong."""
    for kept, unpacks in ((("q8_0", "q8_0"), False), (("q8_0", "f16"), True)):
        plain = Driver(wide, kind=PlainStage, kv_types=kept)
        device = plain.stage._layers._device
        device.info = replace(device.info, backend=endpoint.BACKEND)
        ids = [KINDS[kind] for kind in kept]
        assert plain.stage._layers._how_to_attend([0], *ids) == (True, unpacks)
        plain.close()
