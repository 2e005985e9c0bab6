"""What a file of a dense family says of itself: read, or refused with the key or tensor at fault."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_tools import Raw, rewrite
from hypothesis import given
from hypothesis import strategies as st
from tiny_families import LAYERS, tiny_family

from backends.ggml.models import ModelError, NotNative, Rope, read_config
from backends.ggml.models.config import Growth
from backends.ggml.models.rope import Yarn
from quant.gguf import open_gguf


def refusal(path: Path, kind: type[ModelError] = ModelError) -> str:
    with pytest.raises(kind) as caught:
        read_config(open_gguf(path))
    assert type(caught.value) is kind
    assert path.name in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


HOSTILE: list[tuple[str, str, Any]] = [
    ("llama", "rope.scaling.type", "ntk"),
    ("llama", "rope.scaling.factor", 1e-9),
    ("llama", "rope.scaling.factor", -2.0),
    ("llama", "rope.scaling.original_context_length", 0),
    ("llama", "rope.freq_base", 1.0),
    ("llama", "rope.freq_base", 0.0),
    ("llama", "rope.dimension_count", 1 << 20),
    ("llama", "nextn_predict_layers", 2),
    ("llama", "attention.temperature_scale", "hot"),
    ("gemma2", "attn_logit_softcapping", -1.0),
    ("gemma2", "final_logit_softcapping", math.nan),
    ("gemma3", "rope.freq_base_swa", 0.5),
    ("granite", "rope.scaling.finetuned", 3),
    ("starcoder2", "attention.layer_norm_epsilon", None),
]
YARN_HOSTILE = [("yarn_beta_slow", 0.0), ("yarn_beta_fast", math.inf), ("yarn_log_multiplier", -1.0)]


@pytest.mark.parametrize(("arch", "key", "value"), HOSTILE)
def test_a_hostile_value_is_refused_by_its_key(tmp_path: Path, arch: str, key: str, value: Any):
    path = tiny_family(tmp_path / "m.gguf", arch)
    changed = rewrite(path, tmp_path / "changed.gguf", {f"{arch}.{key}": value})
    assert f"{arch}.{key} must be" in refusal(changed)


@pytest.mark.parametrize(("key", "value"), YARN_HOSTILE)
def test_hostile_values_of_yarn(tmp_path: Path, key: str, value: float):
    metadata = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, f"rope.scaling.{key}": value}
    assert f"llama.rope.scaling.{key} must be" in refusal(tiny_family(tmp_path / "m.gguf", "llama", metadata))


@pytest.mark.parametrize(
    ("arch", "key", "value"),
    [
        ("glm4", "rope.dimension_sections", [8, 12, 12, 0]),
        ("granite", "deepstack_mapping", [-1, 0]),
    ],
)
def test_kinds_that_are_not_built_are_left_to_others(tmp_path: Path, arch: str, key: str, value: Any):
    path = tiny_family(tmp_path / "m.gguf", arch, {key: value})
    assert f"{arch}.{key}" in refusal(path, NotNative)


def test_queries_and_keys_in_one_matrix_of_layers_without_keys(tmp_path: Path):
    """Upstream knows what part of it to leave out."""
    pattern = {"attention.sliding_window_pattern": [True, False, True], "attention.shared_kv_layers": 1}
    fused = LAYERS["gemma4"].replace("attn_q attn_k attn_v", "attn_qkv")
    path = tiny_family(tmp_path / "m.gguf", "gemma4", pattern, n_layers=3, layers=fused)
    assert "of layers that share others" in refusal(path, NotNative)


@pytest.mark.parametrize(
    "wrong",
    [
        {"attention.shared_kv_layers": 3},  # of four: too few are left
        {"attention.shared_kv_layers": 2, "attention.sliding_window_pattern": [True, True, True, False]},
        {"attention.shared_kv_layers": 1, "attention.sliding_window_pattern": [True, False, True, True]},
        {"attention.shared_kv_layers": True},
    ],
)
def test_layers_that_have_nobody_to_share_keys_with(tmp_path: Path, wrong: dict[str, Any]):
    path = tiny_family(tmp_path / "m.gguf", "gemma4", wrong, n_layers=4)
    assert "gemma4.attention.shared_kv_layers must be" in refusal(path)


@pytest.mark.parametrize("wrong", [[96, 96], [96, 0, 96]])
def test_widths_of_feed_forwards(tmp_path: Path, wrong: list[Any]):
    path = tiny_family(tmp_path / "m.gguf", "llama", n_layers=3, n_ff=[96, 128, 64])
    assert read_config(open_gguf(path)).ff_widths == (96, 128, 64)
    changed = rewrite(path, tmp_path / "changed.gguf", {"llama.feed_forward_length": wrong})
    assert "llama.feed_forward_length must be 3 integers" in refusal(changed)


def test_kv_heads_by_kind_of_layer(tmp_path: Path):
    sizes = {"attention.key_length": 64, "attention.value_length": 64}
    sizes |= {f"{key}_swa": 32 for key in sizes}
    pattern = {"attention.sliding_window_pattern": [True, True, False]}
    heads = [(32, 4), (32, 4), (64, 1)]
    options = {"n_layers": 3, "heads": heads}
    counts = {"attention.head_count_kv": [4, 4, 1]}
    path = tiny_family(tmp_path / "m.gguf", "gemma4", sizes | pattern | counts, **options)
    config = read_config(open_gguf(path))
    assert [config.heads_of(layer) for layer in range(3)] == [(4, 32, 32), (4, 32, 32), (1, 64, 64)]
    for wrong in ([4, 2, 1], [4, 4], [4, 4, 0]):
        counts = {"attention.head_count_kv": wrong}
        path = tiny_family(tmp_path / "m.gguf", "gemma4", sizes | pattern | counts, **options)
        assert "gemma4.attention.head_count_kv must be" in refusal(path)


def test_tensors_that_are_wrong(tmp_path: Path):
    path = tiny_family(tmp_path / "m.gguf", "qwen2")
    out, half = tmp_path / "changed.gguf", Raw("F16", (64,), np.ones(64, np.float16).tobytes())
    rewrite(path, out, {}, {"blk.1.attn_norm.weight": half})
    assert "blk.1.attn_norm.weight is F16; norms and biases must be F32" in refusal(out)
    rewrite(path, out, {}, {"blk.0.attn_q.bias": Raw("F32", (32,), bytes(128))})
    assert "blk.0.attn_q.bias has shape (32,), expected (64,)" in refusal(out)
    rewrite(path, out, {}, {"rope_factors_short.weight": Raw("F32", (8,), bytes(32))})
    assert "rope_factors_long.weight is missing" in refusal(out)
    rewrite(path, out, {}, {"blk.2.attn_norm.weight": Raw("F32", (64,), bytes(256))})
    assert "blk.2.attn_norm.weight is not part of family qwen2" in refusal(out)


def test_layers_that_guess_ahead_are_left_out(tmp_path: Path):
    path = tiny_family(tmp_path / "m.gguf", "glm4", {"nextn_predict_layers": 1}, n_layers=3)
    assert read_config(open_gguf(path)).n_layer == 2


@given(
    st.sampled_from([16, 64, 128]),
    st.floats(1.5, 1e7),
    st.floats(1.0, 64.0),
    st.integers(1, 1 << 20),
    st.floats(1e-3, 1e3),
    st.floats(1e-3, 1e3),
)
def test_yarn_lies_between_stretched_and_not(
    n_rot: int, base: float, factor: float, context: int, fast: float, slow: float
):
    plain = Rope(n_rot, base, 1 / factor, False)
    mixed = Rope(n_rot, base, 1 / factor, False, yarn=Yarn(context, fast, slow)).frequencies(None)
    stretched = plain.frequencies(None)
    assert (mixed >= stretched * (1 - 1e-12)).all() and (mixed <= factor * stretched * (1 + 1e-12)).all()


def test_queries_grow_by_whole_contexts():
    factors = Growth(0.5, 100).factors(np.array([0, 99, 100, 199, 200], np.int32))
    np.testing.assert_allclose(factors, 1 + 0.5 * np.log([1, 1, 2, 2, 3]), rtol=1e-6)
