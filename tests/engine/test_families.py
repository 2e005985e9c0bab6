"""Every dense family against libllama, with each of its options, and with each of them switched off."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from driver import Driver
from family_tools import CHANGES, WAYS, Model, PlainStage, check_logits, check_options, of_libllama, relative
from scale import FULL
from tiny_families import LAYER_INPUT, LAYERS, tiny_family
from tiny_models import libllama_logits

from backends.base import BLOCK_SIZE
from backends.ggml.models import FAMILIES, read_config
from backends.ggml.paged import PADDING
from backends.ggml.stage import GgmlStage
from hetero.pipeline.part import ModelPart
from hetero.plan.facts import F32_BYTES, model_facts
from hetero.plan.planner import Limits
from quant.gguf import open_gguf

YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
EVERYWHERE = "attn_norm attn_q+ attn_k+ attn_v+ attn_output+ ffn_norm ffn_gate+ ffn_up+ ffn_down+"
FUSED = "attn_norm attn_qkv+ attn_output ffn_norm ffn_gate ffn_up ffn_down"
GEMMA4_HEADS = {
    "attention.head_count_kv": [2, 2, 1, 2, 1, 2],
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.key_length_swa": 32,
    "attention.value_length_swa": 32,
    "attention.sliding_window_pattern": [True, True, False, True, False, True],
    "rope.dimension_count": 64,
    "rope.dimension_count_swa": 32,
    "rope.freq_base": 1e6,
    "final_logit_softcapping": 3.0,
}
SHARING = [(32, 2), (32, 2), (64, 1), (32, 2), (64, 1), (32, 2)]
WITHOUT_KEYS = LAYERS["gemma4"].replace("attn_k attn_v ", "").replace("attn_k_norm ", "")
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
    "gemma4": Variant(
        "gemma4",
        {
            **GEMMA4_HEADS,
            "attention.head_count_kv": [4, 4, 1],
            "attention.sliding_window_pattern": [True, True, False],
        },
        {
            "n_layers": 3,
            "heads": [(32, 4), (32, 4), (64, 1)],
            "layers": [LAYERS["gemma4"]] * 2 + [LAYERS["gemma4"].replace("attn_v ", "")],
            "extra": {"rope_freqs.weight": (32,)},
        },
    ),
    "gemma4 inputs": Variant(
        "gemma4",
        {**GEMMA4_HEADS, "attention.shared_kv_layers": 3, "embedding_length_per_layer_input": LAYER_INPUT},
        {
            "n_layers": 6,
            "n_ff": [96] * 3 + [192] * 3,
            "heads": SHARING,
            "layers": LAYERS["gemma4"] + " inp_gate proj post_norm",  # keys that nobody needs, too
            "extra": {
                "rope_freqs.weight": (32,),
                "per_layer_token_embd.weight": (311, 6 * LAYER_INPUT),
                "per_layer_model_proj.weight": (6 * LAYER_INPUT, 64),
                "per_layer_proj_norm.weight": (LAYER_INPUT,),
            },
        },
    ),
    "gemma4 shared": Variant(
        "gemma4",
        {**GEMMA4_HEADS, "attention.shared_kv_layers": 3},
        {
            "n_layers": 6,
            "heads": SHARING,
            "layers": [LAYERS["gemma4"]] * 3 + [WITHOUT_KEYS] * 3,
            "extra": {"rope_freqs.weight": (32,)},
        },
    ),
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


NAMED = ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS", "MXFP4"]
OTHERS = ["Q2_K", "Q3_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL"]
OTHERS += ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "NVFP4", "Q1_0", "Q2_0", "BF16", "F16"]
# Activations are rounded to 8 bits in blocks, where the least difference before moves codes. libllama with
# flash attention is as far from libllama without.
ROUNDED_BOUND = 0.03
ROUNDED_TOP1 = 0.9


@pytest.mark.parametrize("type_name", NAMED + (OTHERS if FULL else []))
def test_weight_types(tmp_path: Path, type_name: str):
    path = tmp_path / "m.gguf"
    tiny_family(path, "qwen2", seed=1, n_layers=1, n_embd=256, n_ff=512, weight_type=type_name)
    ids = [int(i) for i in np.random.default_rng(0).integers(3, 300, 60)]
    want = libllama_logits(path, ids)
    driver = Driver(path, threads=1)
    got = driver.logits(ids, chunk=60)
    print(f"{relative(got, want):.4f}")
    assert relative(got, want) <= ROUNDED_BOUND
    assert (got.argmax(1) == want.argmax(1)).mean() >= ROUNDED_TOP1
    np.testing.assert_array_equal(driver.logits(ids, chunk=7), got)
    driver.close()


def test_a_part_of_a_model_is_read_as_one(model: Model, tmp_path: Path):
    """What a worker on another machine is sent has all that its layers need, and no more."""
    gguf = open_gguf(model.path)
    config = read_config(gguf)
    for layers in ((0, 1), (1, config.n_layer)):
        path = tmp_path / f"{layers[0]}.gguf"
        path.write_bytes(b"".join(chunk.tobytes() for chunk in ModelPart(gguf, config, *layers).chunks()))
        part = read_config(open_gguf(path), layers)
        assert replace(part, present=config.present) == config
        assert part.present <= config.present


def test_the_plan_counts_what_the_stage_takes(model: Model):
    """Keys and values exactly, weights and compute buffer from above, though not by much."""
    gguf = open_gguf(model.path)
    config, tokens = read_config(gguf), 64
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=tokens)
    facts = model_facts(gguf, config, limits)
    assert facts.kv_bytes_per_token == facts.plain_kv_bytes_per_token
    for kind in (GgmlStage, PlainStage):
        driver = Driver(model.path, num_blocks=64, max_tokens=tokens, threads=1, kind=kind)
        taken, held = driver.stage.memory(), driver.stage._layers.weights.nbytes
        driver.close()
        places = BLOCK_SIZE * (64 + (PADDING if kind is PlainStage else 0))
        assert taken["kv"] == sum(facts.kv_bytes_per_token) * places
        gathered = facts.gather_bytes_per_token * places if kind is PlainStage else 0
        assert taken["compute"] <= facts.compute_bytes + tokens * config.n_vocab * F32_BYTES + gathered
        assert held <= taken["weights"] <= facts.weight_bytes - facts.shared_bytes
    assert taken["weights"] >= 0.9 * (facts.weight_bytes - facts.shared_bytes)


def test_every_dense_family_is_here():
    assert set(LAYERS) == {v.arch for v in VARIANTS.values()}
    attend = {name: family.mixture for name, family in FAMILIES.items() if not family.recurrent}
    assert set(LAYERS) == {n for n, mixture in attend.items() if mixture is None or not mixture.required}
