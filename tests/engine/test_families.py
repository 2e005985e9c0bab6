"""Every dense family against libllama, with each of its options, and with each of them switched off."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from family_tools import CHANGES, WAYS, Model, check_logits, check_options, of_libllama
from tiny_families import LAYERS, tiny_family

from backends.ggml.models import FAMILIES

YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
EVERYWHERE = "attn_norm attn_q+ attn_k+ attn_v+ attn_output+ ffn_norm ffn_gate+ ffn_up+ ffn_down+"
FUSED = "attn_norm attn_qkv+ attn_output ffn_norm ffn_gate ffn_up ffn_down"
LONG = {"rope_factors_short.weight": (8,), "rope_factors_long.weight": (8,)}


class Variant(NamedTuple):
    arch: str
    metadata: Mapping[str, Any] = MappingProxyType({})
    options: Mapping[str, Any] = MappingProxyType({})


VARIANTS = {
    "llama": Variant("llama"),
    "llama factors": Variant("llama", {}, {"extra": {"rope_freqs.weight": (8,)}}),
    "llama linear": Variant("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "llama yarn": Variant("llama", {**YARN, "rope.scaling.attn_factor": 1.2}),
    "llama unscaled": Variant("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "llama biases": Variant("llama", {}, {"layers": EVERYWHERE}),
    "llama fused": Variant("llama", {}, {"layers": FUSED}),
    "mistral3": Variant(
        "mistral3",
        {
            **YARN,
            "rope.scaling.yarn_beta_fast": 0.5,
            "rope.scaling.yarn_beta_slow": 0.1,
            "rope.scaling.yarn_log_multiplier": 0.5,
            "attention.temperature_scale": 0.3,
        },
    ),
    "qwen2": Variant("qwen2"),
    "qwen2 head": Variant("qwen2", {}, {"extra": {"output.weight": (311, 64), "output.bias": (311,)}}),
    "qwen3": Variant("qwen3"),
    "gemma2": Variant("gemma2", YARN),
    "gemma3": Variant("gemma3", {"rope.scaling.factor": 8.0, "rope.freq_base": 1e6}, {"n_layers": 6}),
    "phi3": Variant("phi3"),
    "phi3 short": Variant("phi3", {"rope.scaling.attn_factor": 1.1}, {"extra": LONG}),
    "phi3 long": Variant("phi3", {"rope.scaling.original_context_length": 64}, {"extra": LONG}),
    "granite": Variant("granite"),
    "granite no rope": Variant("granite", {"rope.scaling.finetuned": False}),
    "glm4": Variant("glm4"),
    "starcoder2": Variant("starcoder2"),
    "olmo2": Variant("olmo2"),
    "olmo2 windows": Variant("olmo2", {**YARN, "attention.sliding_window": 16}, {"n_layers": 4}),
    "smollm3": Variant("smollm3", {}, {"n_layers": 4}),
    "seed_oss": Variant("seed_oss"),
    "cohere2": Variant("cohere2", {}, {"n_layers": 4}),
}


@pytest.fixture(scope="module", params=VARIANTS, ids=[name.replace(" ", "-") for name in VARIANTS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    variant = VARIANTS[request.param]
    path = tmp_path_factory.mktemp("families") / "m.gguf"
    return of_libllama(tiny_family(path, variant.arch, variant.metadata, **variant.options))


@pytest.mark.parametrize("way", WAYS)
def test_logits_are_those_of_libllama(model: Model, way: str, monkeypatch: pytest.MonkeyPatch):
    check_logits(model, way, monkeypatch)


def test_each_option_switched_off_is_noticed(model: Model):
    check_options(model, CHANGES, least=3)


def test_every_dense_family_is_here():
    assert set(LAYERS) == {v.arch for v in VARIANTS.values()}
    assert set(LAYERS) == {n for n, f in FAMILIES.items() if f.mixture is None or not f.mixture.required}
