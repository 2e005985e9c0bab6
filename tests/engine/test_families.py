"""Every dense family against libllama, with each of its options, and with each of them switched off."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from driver import Driver
from tiny_families import LAYERS, tiny_family
from tiny_models import libllama_logits

from backends.ggml import layers as device_layers
from backends.ggml.models import FAMILIES, Family, ModelConfig, ModelError, Rope, read_config
from backends.ggml.stage import GgmlStage
from quant.gguf import open_gguf

# Of norms, against libllama with an F32 cache; ours is F16, and libllama with such a cache is as far away.
BOUND = 1e-3
FLASH_BOUND = 3e-3  # ggml's fused attention sums few rows in halfs
CLEAR = 0.02  # of the logits' deviation: what sets the best apart from the next where top-1 must be equal
CONTEXT = 512  # of libllama; the model's when it chooses between LongRoPE's factors

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


class Model(NamedTuple):
    """`ids` of two sequences that begin with the same SHARED tokens, and what libllama makes of them."""

    path: Path
    ids: list[list[int]]
    want: list[np.ndarray]


SHARED = 48


@pytest.fixture(scope="module", params=VARIANTS, ids=[name.replace(" ", "-") for name in VARIANTS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    variant = VARIANTS[request.param]
    path = tmp_path_factory.mktemp("families") / "m.gguf"
    tiny_family(path, variant.arch, variant.metadata, **variant.options)
    ids = [[int(i) for i in np.random.default_rng(7).integers(3, 300, 90)]]
    ids.append(ids[0][:SHARED] + ids[0][:20])
    return Model(path, ids, [libllama_logits(path, i, CONTEXT) for i in ids])


class PlainStage(GgmlStage):
    """As on a device without kernels of ours."""

    def _kind(self) -> type[device_layers.DeviceLayers]:
        return device_layers.DeviceLayers


@pytest.fixture(params=["kernels", "flash", "products"])
def way(request: pytest.FixtureRequest, model: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple]:
    """A driver with our kernels, or ggml's operators with and without its fused attention; and its bound."""
    if request.param == "products":
        monkeypatch.setattr(device_layers, "can_flash_attend", lambda *shape: False)
    kind = GgmlStage if request.param == "kernels" else PlainStage
    driver = Driver(model.path, max_tokens=192, threads=1, kind=kind, max_context=CONTEXT)
    yield driver, FLASH_BOUND if request.param == "flash" else BOUND
    driver.close()


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def assert_same(got: np.ndarray, want: np.ndarray, bound: float) -> None:
    assert relative(got, want) <= bound
    best = np.sort(want, axis=1)
    clear = best[:, -1] - best[:, -2] > CLEAR * want.std()
    assert (got.argmax(1) == want.argmax(1))[clear].all()


def test_logits_are_those_of_libllama(model: Model, way: tuple[Driver, float]):
    """Sequences of different lengths side by side; in chunks; after a prefix that another left behind."""
    driver, bound = way
    (first, second), (want, other) = model.ids, model.want
    tables = np.split(np.random.default_rng(1).permutation(np.arange(1, 33)), 4)
    lengths = [len(first), 1, 33]
    together = [(t, 0, first[:n]) for t, n in zip(tables, lengths, strict=False)]
    *mine, apart = driver.step([*together, (tables[3], 0, second)])
    for n, logits in zip(lengths, mine, strict=True):
        assert_same(logits, want[:n], bound)
    assert_same(apart, other, bound)
    begun = [*tables[0][: SHARED // 16], 40, 41]
    both = driver.step([(tables[0], 80, first[80:]), (begun, SHARED, second[SHARED:])])
    assert_same(both[0], want[80:], bound)
    assert_same(both[1], other[SHARED:], bound)
    assert_same(driver.logits(first, chunk=23, seed=2), want, bound)


Change = Callable[[ModelConfig], ModelConfig]
BLOCK_OPTIONS = ("norm", "qk_norm", "pre_norms", "post_norms", "ffn_norm", "parallel", "activation", "ffn")


def of_ropes(change: Callable[[Rope], Rope | None]) -> Change:
    def changed(c: ModelConfig) -> ModelConfig:
        return replace(c, layer_ropes=tuple(r and change(r) for r in c.layer_ropes))

    return changed


def of_family(option: str) -> Change:
    default = {f.name: f.default for f in fields(Family)}[option]
    return lambda c: replace(c, family=replace(c.family, **{option: default}))


def without_bias(stem: str) -> Change:
    return lambda c: replace(c, present=frozenset(n for n in c.present if f"{stem}.bias" not in n))


def other_factors(c: ModelConfig) -> ModelConfig:
    long = {r for r in c.layer_ropes if r is not None and r.is_long(CONTEXT)}
    return c.for_context(1 if long else 1 << 20)


def everywhere(c: ModelConfig) -> ModelConfig:
    rope = next((r for r in c.layer_ropes if r is not None), Rope(16, 10000.0, 1.0, False))
    return replace(c, layer_ropes=(rope,) * c.n_layer)


CHANGES: dict[str, Change] = {
    "attention scale": lambda c: replace(c, attention_scale=1.5 * c.attention_scale),
    "attention cap": lambda c: replace(c, attention_softcap=0.0),
    "growth": lambda c: replace(c, query_growth=None),
    "embedding scale": lambda c: replace(c, embedding_scale=1.0),
    "residual scale": lambda c: replace(c, residual_scale=1.0),
    "logit scale": lambda c: replace(c, logit_scale=1.0),
    "logit cap": lambda c: replace(c, logit_softcap=0.0),
    "windows": lambda c: replace(c, layer_windows=(None,) * c.n_layer),
    "no rope": of_ropes(lambda rope: None),
    "rope of all": everywhere,
    "pairs": of_ropes(lambda rope: replace(rope, neox=not rope.neox)),
    "whole heads": of_ropes(lambda rope: replace(rope, n_rot=16)),
    "scale": of_ropes(lambda rope: replace(rope, scale=1.0)),
    "yarn": of_ropes(lambda rope: replace(rope, yarn=None)),
    "turns": of_ropes(lambda rope: replace(rope, yarn=rope.yarn and rope.yarn._replace(fast=32.0))),
    "magnitude": of_ropes(lambda rope: replace(rope, magnitude=1.0)),
    "factors": of_ropes(lambda rope: replace(rope, factors=None, long_factors=None)),
    "other factors": other_factors,
    **{option: of_family(option) for option in BLOCK_OPTIONS},
    **{
        f"bias of {stem}": without_bias(stem)
        for stem in [f"attn_{p}" for p in ("norm", "q", "k", "v", "qkv", "output")]
        + [f"ffn_{p}" for p in ("norm", "gate", "up", "down")]
        + ["output_norm", "output"]
    },
}
# to a query's score a bias of the keys adds the same for all keys, but for RoPE
FAINT = {"bias of attn_k": 10 * BOUND}


def test_each_option_switched_off_is_noticed(model: Model):
    """The comparison has teeth: without any one of its options, no variant of any family passes it."""
    config = read_config(open_gguf(model.path))
    tried = 0
    for name, change in CHANGES.items():
        changed = change(config)
        if changed == config:
            continue  # not an option of this family
        try:
            driver = Driver(model.path, max_tokens=128, threads=1, max_context=CONTEXT, change=change)
        except (KeyError, ModelError):  # it asks for a tensor that the file does not have
            tried += 1
            continue
        error = relative(driver.logits(model.ids[0], chunk=90), model.want[0])
        driver.close()
        print(f"without {name}: {error:.2g}")
        assert error > FAINT.get(name, 20 * BOUND), name
        tried += 1
    assert tried >= 3


def test_every_dense_family_is_here():
    assert set(LAYERS) == {v.arch for v in VARIANTS.values()}
    assert set(LAYERS) == {name for name, family in FAMILIES.items() if family.experts != "required"}
