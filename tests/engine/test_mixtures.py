"""Every family with experts against libllama, with each of its options and with each of them switched off."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from family_tools import CHANGES, WAYS, Change, Model, check_logits, check_options, of_libllama, without
from tiny_experts import LAYERS, Sizes, tiny_experts

from backends.ggml.models import FAMILIES, ModelConfig
from backends.ggml.models.mixture import Mixture, MixtureOptions
from backends.ggml.models.tensors import has_head_norms

# Share of tokens that rounding may send to another expert than libllama does, or that see such a token.
UNDECIDED = {"kernels": 0.04, "products": 0.04, "flash": 0.15}
WIDTH, SHARED_WIDTH = "expert_feed_forward_length", "expert_shared_feed_forward_length"
NO_WIDTHS = {WIDTH: None, SHARED_WIDTH: None}
FEW = Sizes(layers=2, experts=4, used=2)
GROUPS = {"expert_group_count": 4, "expert_group_used_count": 2}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"sizes": FEW}),
    "llama-groups": ("llama", {"metadata": GROUPS}),
    "qwen2moe": ("qwen2moe", {}),
    "qwen2moe-widths": ("qwen2moe", {"metadata": NO_WIDTHS, "sizes": Sizes(dense=64, used=2)}),
    "qwen3moe": ("qwen3moe", {"sizes": FEW}),
    "granitemoe": ("granitemoe", {}),
    "granitemoe-alone": (
        "granitemoe",
        {"metadata": {SHARED_WIDTH: 0}, "without": ("_shexp.weight",)},
    ),
    "glm4moe": ("glm4moe", {"head_norms": True}),
    "glm4moe-groups": ("glm4moe", {"metadata": GROUPS | {"expert_weights_norm": False}}),
    "glm4moe-softmax": ("glm4moe", {"metadata": {"expert_gating_func": 1}}),
    "gpt-oss": ("gpt-oss", {}),
    "gemma4": ("gemma4", {}),
    "gemma4-apart": ("gemma4", {"apart": True, "without": ("ffn_down_exps.scale",)}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    arch, options = VARIANTS[request.param]
    return of_libllama(tiny_experts(tmp_path_factory.mktemp("mixtures") / "m.gguf", arch, **options))


@pytest.mark.parametrize("way", WAYS)
def test_logits_are_those_of_libllama(model: Model, way: str, monkeypatch: pytest.MonkeyPatch):
    check_logits(model, way, monkeypatch, UNDECIDED[way])


def of_mixture(change: Callable[[Mixture], Mixture]) -> Change:
    def changed(c: ModelConfig) -> ModelConfig:
        assert c.mixture is not None
        return replace(c, mixture=change(c.mixture))

    return changed


def of_options(option: str) -> Change:
    default = {f.name: f.default for f in fields(MixtureOptions)}[option]
    return of_mixture(lambda m: replace(m, options=replace(m.options, **{option: default})))


MIXTURE_CHANGES: dict[str, Change] = {
    "gating": of_mixture(lambda m: replace(m, gating="sigmoid" if m.gating == "softmax" else "softmax")),
    # a norm behind the experts makes up for it
    "normed": of_mixture(
        lambda m: m if m.options.beside else replace(m, normed=not m.normed and m.gating != "chosen")
    ),
    "share scale": of_mixture(lambda m: replace(m, scale=1.0)),
    "groups": of_mixture(lambda m: replace(m, groups=1, groups_used=1)),
    "used": of_mixture(lambda m: replace(m, used=m.used - 1)),
    "shared": of_mixture(lambda m: replace(m, shared_width=0)),
    "shared gate": of_options("shared_gate"),
    "selection bias": of_options("selection_bias"),
    "biases of experts": of_options("biases"),
    "beside": of_options("beside"),
    "scales of experts": without("ffn_down_exps.scale"),
    "bias of the router": lambda c: replace(
        c, present=frozenset(n for n in c.present if "gate_inp" not in n)
    ),
    "sinks": lambda c: replace(c, family=replace(c.family, sinks=False)),
    "qk_norm": lambda c: CHANGES["qk_norm"](c) if has_head_norms(c, 0) else c,
}


def test_each_option_switched_off_is_noticed(model: Model):
    check_options(model, CHANGES | MIXTURE_CHANGES, least=4)


def test_every_family_with_experts_is_here():
    assert set(LAYERS) == {arch for arch, _ in VARIANTS.values()}
    attend = {name: family.mixture for name, family in FAMILIES.items() if not family.recurrent}
    always = {name for name, mixture in attend.items() if mixture and mixture.required}
    assert set(LAYERS) == always | {"llama", "gemma4"}
