"""The tiny models are worth something only if libllama computes with them."""

import numpy as np
import pytest
from tiny_models import libllama_logits, tiny_model

IDS = list(range(5, 45))
K_QUANTS = {"n_embd": 256, "n_ff": 256, "n_heads": 8, "n_kv_heads": 4, "head_dim": 32}


def logits(tmp_path, **options):
    return libllama_logits(tiny_model(tmp_path / "a.gguf", **options), IDS)


def differ(a, b) -> bool:
    return bool(np.abs(a - b).max() > 0.1 * a.std())


@pytest.mark.parametrize("type_name", ["F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_weight_types(tmp_path, type_name):
    options = K_QUANTS if type_name.endswith("_K") else {}
    out = logits(tmp_path, weight_type=type_name, embedding_type=type_name, tied=False, **options)
    assert np.isfinite(out).all() and 0.1 < out.std() < 20


def test_options_of_llama_matter(tmp_path):
    plain = logits(tmp_path)
    assert np.array_equal(plain, logits(tmp_path))
    for options in ({"seed": 1}, {"rope_freqs": True}, {"tied": False}):
        assert differ(plain, logits(tmp_path, **options)), options


def test_options_of_gemma3_matter(tmp_path):
    plain = logits(tmp_path, arch="gemma3", n_layers=3)
    assert np.isfinite(plain).all()
    for options in ({"sliding_window": 512}, {"sliding_window_pattern": 2}, {"tied": False}):
        assert differ(plain, logits(tmp_path, arch="gemma3", n_layers=3, **options)), options
