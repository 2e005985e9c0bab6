"""What a file says of its experts: read, or refused with the key or tensor at fault."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf_tools import Raw, Typed, rewrite
from tiny_models import tiny_model

from backends.ggml.models import ModelError, read_config
from quant.gguf import open_gguf


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("experts") / "llama.gguf", n_experts=8, n_layers=1)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "qwen3moe.gguf"
    return tiny_model(path, "qwen3moe", n_experts=8, n_layers=1, metadata={"qwen3moe.feed_forward_length": 9})


def test_experts_are_read(llama: Path, qwen: Path, tmp_path: Path):
    for path in (llama, qwen):
        config = read_config(open_gguf(path))
        mixture = config.mixture
        assert mixture is not None
        assert (mixture.count, mixture.used, mixture.width, *config.ff_widths) == (8, 2, 128, 0)
    for count in (0, 1):  # a single expert is none
        dense = tiny_model(tmp_path / f"{count}.gguf", n_layers=1, metadata={"llama.expert_count": count})
        config = read_config(open_gguf(dense))
        assert (config.mixture, *config.ff_widths) == (None, 128)


def refusal(path: Path, tmp_path: Path, changes: dict, tensors: dict | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        read_config(open_gguf(rewrite(path, tmp_path / "changed.gguf", changes, tensors)))
    assert "changed.gguf" in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


HOSTILE = [
    ("llama", "expert_count", -1),
    ("llama", "expert_count", 1 << 31),
    ("llama", "expert_count", "eight"),
    ("llama", "expert_count", 8.0),
    ("llama", "expert_used_count", 0),
    ("llama", "expert_used_count", 9),
    ("llama", "expert_used_count", None),
    ("llama", "expert_used_count", [2, 3]),
    ("llama", "expert_group_count", 3),
    ("llama", "expert_group_count", 8),
    ("llama", "expert_gating_func", 4),
    ("llama", "expert_weights_scale", float("nan")),
    ("llama", "leading_dense_block_count", 2),
    ("llama", "expert_feed_forward_length", 0),
    ("llama", "expert_feed_forward_length", Typed("i32", -5)),
    ("qwen3moe", "expert_count", None),
    ("qwen3moe", "expert_count", 0),
    ("qwen3moe", "expert_feed_forward_length", "wide"),
]


@pytest.mark.parametrize(("arch", "key", "value"), HOSTILE)
def test_a_hostile_value_is_refused_by_its_key(llama, qwen, tmp_path, arch, key, value):
    path = llama if arch == "llama" else qwen
    assert f"{arch}.{key} must be" in refusal(path, tmp_path, {f"{arch}.{key}": value})


def test_a_family_without_experts_refuses_them(tmp_path: Path):
    path = tiny_model(tmp_path / "m.gguf", "gemma3", n_layers=1)
    changes = {"gemma3.expert_count": 4, "gemma3.expert_used_count": 2}
    assert "gemma3.expert_count must be 0 in this family" in refusal(path, tmp_path, changes)


@pytest.mark.parametrize("name", ["ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"])
def test_a_tensor_is_missing_or_of_another_shape(llama: Path, tmp_path: Path, name: str):
    tensor = f"blk.0.{name}.weight"
    assert f"{tensor} is missing" in refusal(llama, tmp_path, {}, {tensor: None})
    fewer = Raw("F32", (64, 128, 7), np.zeros(64 * 128 * 7, np.float32).tobytes())
    assert f"{tensor} has shape (64, 128, 7), expected" in refusal(llama, tmp_path, {}, {tensor: fewer})


def test_other_tensors_of_experts_are_not_left_out_in_silence(llama: Path, tmp_path: Path):
    shared = Raw("F32", (64, 128), np.zeros(64 * 128, np.float32).tobytes())
    message = refusal(llama, tmp_path, {}, {"blk.0.ffn_up_shexp.weight": shared})
    assert "blk.0.ffn_up_shexp.weight is not part of family llama" in message
