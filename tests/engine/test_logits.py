"""Logits against libllama and against numpy, for tiny random models and for both real ones."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf as gguf_package
import numpy as np
import pytest
from distance import relative
from gguf.quants import dequantize

from backends.cpu.matmul.choice import kernel_for
from backends.ggml.lib import TYPE_F32

sys.path.insert(0, str(Path(__file__).parent))
from driver import Driver
from gguf_tools import Raw, rewrite
from reference import forward
from tiny_models import libllama_logits, tiny_model

# Relative error (of norms) against the numpy reference with keys and values rounded to half as ours
# are; the reference itself is held to libllama with an F32 cache by the same bound. Directly, an f16
# cache is 1e-4 to 4e-4 away from an F32 one, in libllama too. What is left is roundings that fall to
# the other side: of halfs in the cache, and in ggml's table for GELU.
F32_BOUND = 1e-4
# The real models' own weights in F32: half-precision KV is all that differs from libllama's F32 cache.
REAL_F32_MEAN_BOUND = 0.005  # mean absolute difference of logits, whose deviation is about 5
REAL_F32_TOP1 = 0.99
# As quantized: rounding activations to 8 bits is chaotic, so that libllama with flash attention and
# libllama without differ as much. We may not differ more than that, with this much room for chance.
SPREAD_ROOM = 1.25

VARIANTS = [
    ("llama", {}),
    ("llama", {"rope_freqs": True, "tied": False}),
    ("llama", {"n_kv_heads": 1, "head_dim": 32}),
    ("llama", {"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}}),
    ("llama", {"n_experts": 8}),
    ("qwen3moe", {"n_experts": 20, "n_experts_used": 3, "tied": False}),
    ("gemma3", {"n_layers": 3, "sliding_window": 16}),
    ("gemma3", {"n_layers": 3, "sliding_window": 24, "sliding_window_pattern": 3}),
]


@pytest.fixture(
    scope="module", params=range(len(VARIANTS)), ids=[f"{a}-{i}" for i, (a, _) in enumerate(VARIANTS)]
)
def tiny(request, tmp_path_factory):
    arch, options = VARIANTS[request.param]
    path = tiny_model(tmp_path_factory.mktemp("tiny") / "m.gguf", arch, seed=request.param, **options)
    driver = Driver(path, max_tokens=128)
    ids = [int(i) for i in np.random.default_rng(request.param).integers(3, 300, 120)]
    yield path, driver, ids
    driver.close()


def test_the_reference_is_libllama(tiny):
    path, driver, ids = tiny
    want = forward(driver.gguf, driver.config, ids, gelu_table=True)
    assert relative(want, libllama_logits(path, ids)) <= F32_BOUND


@pytest.mark.parametrize("chunk", [1, 16, 50, 120])
def test_tiny_models(tiny, chunk):
    path, driver, ids = tiny
    got = driver.logits(ids, chunk, seed=chunk)
    ours = kernel_for(TYPE_F32) == "ours"  # with an exact GELU
    want = forward(driver.gguf, driver.config, ids, np.float16, gelu_table=not ours)
    assert relative(got, want) <= F32_BOUND
    assert (got.argmax(1) == libllama_logits(path, ids).argmax(1)).mean() >= 0.99


def test_a_broken_graph_is_noticed(tiny, monkeypatch):
    """The comparison has teeth: leaving out one block exceeds the bound by far."""
    path, _, ids = tiny
    from backends.ggml import stage

    build = stage.build_block
    monkeypatch.setattr(
        stage, "build_block", lambda g, layer, x, keep: x if layer == 0 else build(g, layer, x, keep)
    )
    broken = Driver(path, max_tokens=128)
    got = broken.logits(ids, 120)
    assert relative(got, forward(broken.gguf, broken.config, ids, np.float16)) > 100 * F32_BOUND
    broken.close()


def test_sequences_of_different_lengths_in_one_batch(tiny):
    """Bits do not depend on neighbours, chunks or block tables."""
    _, driver, ids = tiny
    lengths = [1, 17, 40, 62]
    tables = np.split(np.random.default_rng(7).permutation(np.arange(1, 197)), 4)
    together = driver.step([(t, 0, ids[:n]) for t, n in zip(tables, lengths, strict=True)])
    for n, got in zip(lengths, together, strict=True):
        np.testing.assert_array_equal(got, driver.logits(ids[:n], chunk=7, seed=n))


@pytest.fixture(scope="module", params=["smollm2_path", "gemma3_path"])
def real(request):
    return request.getfixturevalue(request.param)


def text_ids(path: Path, count: int) -> list[int]:
    from hetero.text.tokenizer import Tokenizer

    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    return Tokenizer(path).encode(text, parse_special=False, add_special=True)[:count]


def test_real_models_in_f32(real, tmp_path):
    """The weights of the real model, dequantized, so that both sides compute the same thing."""
    weights = {
        t.name: Raw(
            "F32", tuple(map(int, t.shape)), dequantize(t.data, t.tensor_type).astype("<f4").tobytes()
        )
        for t in gguf_package.GGUFReader(real).tensors
    }
    path = tmp_path / "f32.gguf"
    rewrite(real, path, {}, weights)
    ids = text_ids(real, 256)
    driver = Driver(path)
    got, want = driver.logits(ids, chunk=100), libllama_logits(path, ids)
    driver.close()
    difference = float(np.abs(got - want).mean())
    print(f"mean absolute difference {difference:.5f}, deviation of the logits {want.std():.2f}")
    assert (got.argmax(1) == want.argmax(1)).mean() >= REAL_F32_TOP1
    assert difference <= REAL_F32_MEAN_BOUND


def test_real_models_as_quantized(real):
    ids = text_ids(real, 256)
    driver = Driver(real)
    got = driver.logits(ids, chunk=100)
    driver.close()
    plain, flash = libllama_logits(real, ids), libllama_logits(real, ids, flash=True)
    ours, theirs = np.abs(got - plain).mean(), np.abs(flash - plain).mean()
    top1 = [(a.argmax(1) == plain.argmax(1)).mean() for a in (got, flash)]
    print(
        f"mean absolute difference {ours:.4f} (libllama itself {theirs:.4f}), "
        f"top-1 {top1[0]:.3f} ({top1[1]:.3f})"
    )
    assert ours <= SPREAD_ROOM * theirs
    assert 1 - top1[0] <= SPREAD_ROOM * (1 - top1[1]) + 0.01
