"""Mixtures of experts: one layer against numpy, whole models against libllama, bits against bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from distance import relative

sys.path.insert(0, str(Path(__file__).parent))
from driver import Driver
from experts_tools import ExpertLayer
from gguf_tools import Raw, rewrite
from tiny_experts import Sizes, tiny_experts
from tiny_models import libllama_logits, random_tensor, tiny_model

from backends.cpu import layers, matmul
from backends.cpu.packed import packable
from backends.ggml import layers as device_layers
from backends.ggml.models.experts import expert_group
from backends.ggml.models.mixture import expert_weights
from backends.ggml.stage import GgmlStage

# Of norms, without the residual. Activations are rounded to 8 bits twice, in blocks of 32 or of 256.
LAYER_BOUNDS = {"F32": 1e-6, "Q8_0": 0.02, "Q5_1": 0.02, "Q4_K": 0.03, "Q6_K": 0.03}
F32_BOUND = 1e-4  # of logits, as in test_logits.py
PLAIN_BOUND = 2e-3  # ggml multiplies cached keys by queries rounded to f16; median over tokens, as below
# Rounding also sends a token to another expert now and then, in libllama with flash attention as in ours:
# errors are the median over tokens, with this much room for chance.
SPREAD_ROOM = 1.25
TOP1 = 0.9
SHAPE = {"n_embd": 256, "n_ff": 512, "n_heads": 8, "n_kv_heads": 4, "head_dim": 32}
ALL, NOBODY = 5, 2  # experts that every token chooses, or none

ours_only = pytest.mark.skipif(not matmul.supported(8, 32, 32), reason="no kernels for this CPU")


def typical(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.median(np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)))


def inputs(count: int, width: int, seed: int = 0) -> np.ndarray:
    """Rows whose first value is large, by which `one_sided` tells them."""
    x = np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)
    x[:, 0] = 4
    return x


def one_sided(path: Path) -> Path:
    """The router of layer 0 changed so that ALL is always chosen and NOBODY never."""
    rng, out = np.random.default_rng(9), path.with_name("one-sided.gguf")
    router = (rng.standard_normal((8, SHAPE["n_embd"])) / 16).astype(np.float32)
    router[ALL, 0], router[NOBODY, 0] = 4, -4
    return rewrite(
        path, out, {}, {expert_weights(0).router: Raw("F32", router.shape[::-1], router.tobytes())}
    )


@pytest.fixture
def plain(monkeypatch):
    """Experts through ggml's operators, as on any device."""
    monkeypatch.setattr(layers, "packable", lambda gguf, n: not expert_group(n) and packable(gguf, n))


@pytest.mark.parametrize("type_name", LAYER_BOUNDS)
def test_a_layer_is_that_of_numpy(tmp_path, type_name):
    path = one_sided(tiny_model(tmp_path / "m.gguf", n_experts=8, weight_type=type_name, n_layers=1, **SHAPE))
    layer = ExpertLayer(path)
    for count in (1, 2, 9, 40, 300):  # ALL has more rows than a segment of 300 tokens
        x = inputs(count, 256, seed=count)
        ids = layer.chosen(x)
        assert (ids == ALL).any(axis=1).all() and NOBODY not in ids
        error = relative(layer.run(x) - x, layer.exact(x) - x)
        print(f"{type_name}, {count} tokens: {error:.2g}")
        assert error <= LAYER_BOUNDS[type_name]
    layer.close()


@pytest.mark.parametrize("type_name", ["F32", "Q8_0"])
def test_the_graph_for_any_device_is_that_of_numpy(tmp_path, plain, type_name):
    path = one_sided(tiny_model(tmp_path / "m.gguf", n_experts=8, weight_type=type_name, n_layers=1, **SHAPE))
    layer = ExpertLayer(path)
    for count in (1, 9, 40):
        x = inputs(count, 256, seed=count)
        assert relative(layer.run(x) - x, layer.exact(x) - x) <= LAYER_BOUNDS[type_name]
    layer.close()


# gate, up and down of each kind of activations; widths that no unit of 256 columns divides
MIXED = [
    ("Q8_0", "Q8_0", "Q8_0", 96, 352),
    ("Q4_K", "Q8_0", "F16", 256, 288),
    ("F32", "Q5_K", "Q4_0", 512, 96),
    ("Q5_0", "F16", "Q6_K", 256, 256),
]


@ours_only
@pytest.mark.parametrize(("gate", "up", "down", "n_embd", "n_ff"), MIXED)
def test_mixed_formats_and_odd_widths(tmp_path, gate, up, down, n_embd, n_ff):
    sizes = SHAPE | {"n_embd": n_embd, "n_ff": n_ff, "n_layers": 1}
    path = tiny_model(tmp_path / "f32.gguf", n_experts=40, n_experts_used=6, **sizes)
    rng, w = np.random.default_rng(1), expert_weights(0)
    shapes = {w.gate: (40, n_ff, n_embd), w.up: (40, n_ff, n_embd), w.down: (40, n_embd, n_ff)}
    tensors = {}
    for (name, shape), type_name in zip(shapes.items(), (gate, up, down), strict=True):
        tensor = random_tensor(rng, shape, type_name, shape[-1] ** -0.5)
        tensors[name] = tensor if isinstance(tensor, Raw) else Raw(type_name, shape[::-1], tensor.tobytes())
    layer = ExpertLayer(rewrite(path, tmp_path / "m.gguf", {}, tensors), threads=3)
    x = inputs(70, n_embd)
    y = layer.run(x)
    assert relative(y - x, layer.exact(x) - x) <= max(LAYER_BOUNDS.values())
    np.testing.assert_array_equal(y[13:14], layer.run(x[13:14]))
    layer.close()


@ours_only
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K"])
def test_a_token_does_not_depend_on_its_batch_nor_on_the_threads(tmp_path, type_name):
    path = one_sided(tiny_model(tmp_path / "m.gguf", n_experts=8, weight_type=type_name, n_layers=1, **SHAPE))
    x = inputs(250, 256)
    layer = ExpertLayer(path)
    whole = layer.run(x)
    for i in (0, 1, 100, 249):
        np.testing.assert_array_equal(layer.run(x[i : i + 1])[0], whole[i])
    for count in (2, 7, 8, 9, 25, 193):
        np.testing.assert_array_equal(layer.run(x[:count]), whole[:count])
    np.testing.assert_array_equal(layer.run(x[::-1].copy()), whole[::-1])
    np.testing.assert_array_equal(layer.run(x[:9], rows=16), whole[:9])
    layer.close()
    for threads in (1, 3):
        layer = ExpertLayer(path, threads)
        np.testing.assert_array_equal(layer.run(x), whole)
        layer.close()


@ours_only
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_token_spoils_itself_only(tmp_path, bad):
    layer = ExpertLayer(tiny_model(tmp_path / "m.gguf", n_experts=8, weight_type="Q8_0", n_layers=1, **SHAPE))
    x = inputs(7, 256)
    clean = layer.run(x)
    x[3, 100] = bad
    y = layer.run(x)
    assert not np.isfinite(y[3]).any()
    np.testing.assert_array_equal(np.delete(y, 3, 0), np.delete(clean, 3, 0))
    layer.close()


def test_of_equal_experts_the_first_is_used(tmp_path):
    path = tiny_model(tmp_path / "m.gguf", n_experts=8, n_experts_used=1)
    router = np.random.default_rng(2).standard_normal((4, 64)).astype(np.float32).repeat(2, axis=0)
    raw = Raw("F32", (64, 8), router.tobytes())
    tied = rewrite(path, tmp_path / "tied.gguf", {}, {expert_weights(i).router: raw for i in range(2)})
    ids = token_ids(60)
    driver = Driver(tied)
    assert relative(driver.logits(ids), libllama_logits(tied, ids)) <= 10 * F32_BOUND  # f16 keys and values
    driver.close()


class PlainStage(GgmlStage):
    """As on a device without kernels of ours."""

    def _kind(self) -> type[device_layers.DeviceLayers]:
        return device_layers.DeviceLayers


@pytest.mark.parametrize(("arch", "used"), [("llama", 2), ("qwen3moe", 5)])
def test_a_stage_without_our_kernels_gives_the_same_logits(tmp_path, monkeypatch, arch, used):
    monkeypatch.setattr(device_layers, "can_flash_attend", lambda *shape: False)  # it rounds more
    path, ids = tiny_model(tmp_path / "m.gguf", arch, n_experts=8, n_experts_used=used), token_ids(90)
    ours, plain = Driver(path, threads=1), Driver(path, threads=1, kind=PlainStage)
    for chunk in (17, 90):
        assert typical(plain.logits(ids, chunk), ours.logits(ids, chunk)) <= PLAIN_BOUND
    ours.close()
    plain.close()


def token_ids(count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(0).integers(3, 300, count)]


WIDE = Sizes(layers=4, embd=256, heads=8, kv_heads=4, head_dim=32, width=256, dense=512)


@pytest.mark.parametrize("type_name", ["Q4_K", "Q5_K", "Q6_K", "Q8_0"])
def test_logits_of_quantized_models(tmp_path, type_name):
    types = {"weight_type": type_name, "embedding_type": type_name, "tied": False}
    path = tiny_model(tmp_path / "m.gguf", seed=3, n_layers=4, n_experts=8, **types, **SHAPE)
    check_quantized(path, type_name)


@pytest.mark.parametrize(
    ("arch", "type_name", "expert_type"),
    [("gpt-oss", "Q8_0", "MXFP4"), ("glm4moe", "Q6_K", "Q4_K"), ("qwen2moe", "Q8_0", "IQ4_XS")],
)
def test_logits_of_quantized_families(tmp_path, arch, type_name, expert_type):
    types = {"weight_type": type_name, "expert_type": expert_type}
    check_quantized(tiny_experts(tmp_path / "m.gguf", arch, seed=3, sizes=WIDE, **types), arch)


def check_quantized(path, type_name):
    """As near to libllama as it is to itself, and with the same bits however the tokens come."""
    ids = token_ids(100)
    libllama, flash = libllama_logits(path, ids), libllama_logits(path, ids, flash=True)
    driver = Driver(path)
    got = driver.logits(ids, chunk=100)
    error, spread = typical(got, libllama), typical(flash, libllama)
    top1, theirs = ((x.argmax(1) == libllama.argmax(1)).mean() for x in (got, flash))
    print(
        f"{type_name}: {error:.4f} from libllama, it from itself {spread:.4f}; top-1 {top1:.2f}, {theirs:.2f}"
    )
    assert error <= SPREAD_ROOM * spread
    assert top1 >= min(TOP1, theirs)
    for chunk in (1, 7, 32):
        np.testing.assert_array_equal(driver.logits(ids, chunk, seed=chunk), got)
    lengths, tables = [1, 2, 9, 17, 31, 40, 50, 60], np.split(np.arange(1, 33), 8)
    together = driver.step([(t, 0, ids[:n]) for t, n in zip(tables, lengths, strict=True)])
    for n, logits in zip(lengths, together, strict=True):
        np.testing.assert_array_equal(logits, got[:n])
    driver.close()
    alone = Driver(path, threads=1)
    np.testing.assert_array_equal(alone.logits(ids), got)
    alone.close()


_GGML_EXPERTS = """
import sys
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
import numpy as np
from driver import Driver
driver = Driver(Path(sys.argv[3]))
ids = [int(i) for i in np.random.default_rng(0).integers(3, 300, 60)]
whole = driver.logits(ids, 60)
assert all(np.array_equal(driver.logits(ids, chunk), whole) for chunk in (1, 5, 20))
"""


def test_bits_of_experts_that_only_ggml_multiplies(tmp_path):
    """In a process of its own: ggml decides once which kernels it takes."""
    path = tiny_model(tmp_path / "m.gguf", n_experts=4, weight_type="Q3_K", n_layers=1, **SHAPE)
    tests = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-c", _GGML_EXPERTS, str(tests), str(tests / "engine"), str(path)]
    subprocess.run(command, cwd=tests.parent, check=True, timeout=60)
