"""A family's graphs against libllama: a tiny model, sequences of it, and what they must give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from distance import relative
from driver import Driver
from tiny_models import libllama_logits

from backends.ggml import layers as device_layers
from backends.ggml.models import Family, ModelConfig, ModelError, Rope, read_config
from backends.ggml.stage import GgmlStage
from quant.gguf import open_gguf

# Of norms, against libllama with an F32 cache; ours is F16, and libllama with such a cache is as far away.
BOUND = 1e-3
FLASH_BOUND = 3e-3  # ggml's fused attention sums few rows in halfs
FLIPPED = 3.0  # times the bound: the error of a token that went to another expert
CLEAR = 0.02  # of the logits' deviation: what sets the best apart from the next where top-1 must be equal
CONTEXT = 512  # of libllama; the model's when it chooses between LongRoPE's factors

Change = Callable[[ModelConfig], ModelConfig]


class Model(NamedTuple):
    """`ids` of two sequences that begin with the same SHARED tokens, and what libllama makes of them."""

    path: Path
    ids: list[list[int]]
    want: list[np.ndarray]


SHARED = 48


def of_libllama(path: Path) -> Model:
    ids = [[int(i) for i in np.random.default_rng(7).integers(3, 300, 90)]]
    ids.append(ids[0][:SHARED] + ids[0][:20])
    return Model(path, ids, [libllama_logits(path, i, CONTEXT) for i in ids])


class PlainStage(GgmlStage):
    """As on a device without kernels of ours."""

    def _kind(self) -> type[device_layers.DeviceLayers]:
        return device_layers.DeviceLayers


WAYS = ("kernels", "flash", "products")  # ours, or ggml's operators with and without its fused attention


def check_logits(model: Model, way: str, monkeypatch: pytest.MonkeyPatch, undecided: float = 0.0) -> None:
    """Sequences of different lengths side by side; in chunks; after a prefix that another left behind.

    `undecided`: share of tokens that may differ by more, where rounding can send one to another expert.
    """
    if way == "products":
        monkeypatch.setattr(device_layers, "can_flash_attend", lambda *shape: False)
    kind = GgmlStage if way == "kernels" else PlainStage
    driver = Driver(model.path, max_tokens=192, threads=1, kind=kind, max_context=CONTEXT)
    try:
        pairs = _steps(model, driver)
    finally:
        driver.close()
    bound = FLASH_BOUND if way == "flash" else BOUND
    lines = [_row_errors(got, want) for got, want in pairs]
    kept = [np.ones(len(e), bool) if not undecided else e <= FLIPPED * bound for e in lines]
    assert np.mean(np.concatenate(kept)) >= 1.0 - undecided
    for (got, want), keep in zip(pairs, kept, strict=True):
        if keep.any():
            assert_same(got[keep], want[keep], bound)


def _row_errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    return np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)


def assert_same(got: np.ndarray, want: np.ndarray, bound: float) -> None:
    assert relative(got, want) <= bound
    best = np.sort(want, axis=1)
    clear = best[:, -1] - best[:, -2] > CLEAR * want.std()
    assert (got.argmax(1) == want.argmax(1))[clear].all()


def _steps(model: Model, driver: Driver) -> list[tuple[np.ndarray, np.ndarray]]:
    """(logits, those of libllama) of several runs of tokens."""
    (first, second), (want, other) = model.ids, model.want
    tables = np.split(np.random.default_rng(1).permutation(np.arange(1, 33)), 4)
    lengths = [len(first), 1, 33]
    together = [(t, 0, first[:n]) for t, n in zip(tables, lengths, strict=False)]
    *mine, apart = driver.step([*together, (tables[3], 0, second)])
    pairs = [(logits, want[:n]) for n, logits in zip(lengths, mine, strict=True)]
    begun = [*tables[0][: SHARED // 16], 40, 41]
    both = driver.step([(tables[0], 80, first[80:]), (begun, SHARED, second[SHARED:])])
    pairs += [(apart, other), (both[0], want[80:]), (both[1], other[SHARED:])]
    return [*pairs, (driver.logits(first, chunk=23, seed=2), want)]


BLOCK_OPTIONS = (
    "norm",
    "qk_norm",
    "pre_norms",
    "post_norms",
    "ffn_norm",
    "parallel",
    "activation",
    "ffn",
    "value_norm",
)


def of_ropes(change: Callable[[Rope], Rope | None]) -> Change:
    def changed(c: ModelConfig) -> ModelConfig:
        return replace(c, layer_ropes=tuple(r and change(r) for r in c.layer_ropes))

    return changed


def of_family(option: str) -> Change:
    default = {f.name: f.default for f in fields(Family)}[option]
    return lambda c: replace(c, family=replace(c.family, **{option: default}))


def without(tensor: str) -> Change:
    return lambda c: replace(c, present=frozenset(n for n in c.present if tensor not in n))


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
    "windows": lambda c: replace(c, layer_windows=tuple(w and CONTEXT for w in c.layer_windows)),
    "no rope": of_ropes(lambda rope: None),
    "rope of all": everywhere,
    "pairs": of_ropes(lambda rope: replace(rope, neox=not rope.neox)),
    "whole heads": of_ropes(lambda rope: rope if rope.factors else replace(rope, n_rot=16)),
    "layer inputs": lambda c: replace(c, layer_input=0),
    "shared keys": lambda c: replace(c, shared_kv=0),
    "output scale": without("layer_output_scale.weight"),
    "scale": of_ropes(lambda rope: replace(rope, scale=1.0)),
    "yarn": of_ropes(lambda rope: replace(rope, yarn=None)),
    "turns": of_ropes(lambda rope: replace(rope, yarn=rope.yarn and rope.yarn._replace(fast=32.0))),
    "magnitude": of_ropes(lambda rope: replace(rope, magnitude=1.0)),
    "factors": of_ropes(lambda rope: replace(rope, factors=None, long_factors=None)),
    "other factors": other_factors,
    **{option: of_family(option) for option in BLOCK_OPTIONS},
    **{
        f"bias of {stem}": without(f"{stem}.bias")
        for stem in [f"attn_{p}" for p in ("norm", "q", "k", "v", "qkv", "output")]
        + [f"ffn_{p}" for p in ("norm", "gate", "up", "down")]
        + ["output_norm", "output"]
    },
}
# to a query's score a bias of the keys adds the same for all keys, but for RoPE
FAINT = {"bias of attn_k": 10 * BOUND}


def check_options(model: Model, changes: Mapping[str, Change], least: int) -> None:
    """The comparison has teeth: without any one of its options, `least` or more, the model fails it."""
    config = read_config(open_gguf(model.path))
    tried = 0
    for name, change in changes.items():
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
    assert tried >= least
