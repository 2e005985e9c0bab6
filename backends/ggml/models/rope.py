"""Rotary embeddings: which angle each pair of a head's values is turned by at a position.

    angle of pair i = position * f_i,    f_i = base^(-2i / n_rot) / factor_i * s_i

s_i is `scale`, but with YaRN a mix of `scale` and 1: pairs that turn often within the original context are
left alone, those that turn seldom are stretched. Cosine and sine are times `magnitude`.

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753); ggml_rope_ext and
llama_context's constructor in llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from backends.ggml.models.metadata import Metadata

LINEAR, YARN, LONGROPE, NONE = "linear", "yarn", "longrope", "none"
SMALLEST, LARGEST = 1e-3, 1e6  # of factors in the metadata
FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"


class Yarn(NamedTuple):
    """`original_context` tokens were trained on; `fast` and `slow` turns in these bound the mix."""

    original_context: int
    fast: float
    slow: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of one kind of layer.

    `neox`: pairs are (i, i + n_rot / 2), else (2i, 2i + 1). `factors` names a tensor of n_rot / 2 values
    that divide the frequencies, as Llama 3's `rope_freqs.weight` does. `long_factors` takes its place in
    contexts longer than `short_context` tokens (LongRoPE): see `for_context`.
    """

    n_rot: int
    base: float
    scale: float
    neox: bool
    factors: str | None = None
    magnitude: float = 1.0
    yarn: Yarn | None = None
    long_factors: str | None = None
    short_context: int = 0

    def is_long(self, context: int) -> bool:
        """Whether contexts of up to so many tokens take other factors than the shortest."""
        return self.long_factors is not None and context > self.short_context

    def for_context(self, context: int) -> Rope:
        """The rope with one set of factors, for contexts of up to so many tokens."""
        factors = self.long_factors if self.is_long(context) else self.factors
        return replace(self, factors=factors, long_factors=None, short_context=0)

    def unscaled(self, base: float) -> Rope:
        """As in layers that see a short context only: with another base, and never stretched."""
        return Rope(self.n_rot, base, 1.0, self.neox)

    def frequencies(self, factors: np.ndarray | None) -> np.ndarray:
        """float64 [n_rot / 2]: radians per position of each pair. `factors`: the named tensor's values."""
        plain = self.base ** (-np.arange(0, self.n_rot, 2, dtype=np.float64) / self.n_rot)
        if factors is not None:
            plain = plain / factors
        if self.yarn is None:
            return self.scale * plain
        low, high = (self._pair_that_turns(turns) for turns in (self.yarn.fast, self.yarn.slow))
        low, high = max(0.0, math.floor(low)), min(self.n_rot - 1.0, math.ceil(high))
        ramp = (np.arange(self.n_rot // 2) - low) / max(0.001, high - low)
        alone = 1.0 - np.clip(ramp, 0.0, 1.0)
        return plain * (self.scale * (1.0 - alone) + alone)

    def _pair_that_turns(self, turns: float) -> float:
        """The pair, counted in fractions, that turns so often within YaRN's original context."""
        assert self.yarn is not None
        ratio = self.yarn.original_context / (turns * 2.0 * math.pi)
        return self.n_rot * math.log(ratio) / (2.0 * math.log(self.base))

    @property
    def ggml_magnitude(self) -> float:
        """`magnitude` as ggml_rope_ext wants it, which multiplies what YaRN itself prescribes."""
        return self.magnitude if self.yarn is None else self.magnitude / _yarn_magnitude(self.scale)


def read_rope(meta: Metadata, tensors: Container[str], n_rot: int, neox: bool, n_ctx_train: int) -> Rope:
    """The rope of layers that see the whole context. `tensors`: names in the file."""
    scaling = meta.get("rope.scaling.type") or LINEAR
    if scaling not in (LINEAR, YARN, LONGROPE, NONE):
        raise meta.error("rope.scaling.type", scaling, "none, linear, yarn or longrope")
    base = meta.number("rope.freq_base", 10000.0)
    if base <= 1.0:
        raise meta.error("rope.freq_base", base, "greater than 1")
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 0.0))
    if factor != 0.0 and not SMALLEST <= factor <= LARGEST:
        raise meta.error("rope.scaling.factor", factor, f"between {SMALLEST:g} and {LARGEST:g}")
    scale = 1.0 if factor == 0.0 or scaling == NONE else 1.0 / factor
    original = meta.size("rope.scaling.original_context_length", 1, 1 << 30, n_ctx_train)
    magnitude = meta.number("rope.scaling.attn_factor", 1.0)
    yarn = None
    if scaling == YARN:
        keys = ("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")
        fast, slow = (meta.number(key, usual) for key, usual in zip(keys, (32.0, 1.0), strict=True))
        for key, turns in zip(keys, (fast, slow), strict=True):
            if not SMALLEST <= turns <= LARGEST:
                raise meta.error(key, turns, f"between {SMALLEST:g} and {LARGEST:g}")
        yarn = Yarn(original, fast, slow)
        magnitude *= _yarn_attention_factor(meta, scale)
    rope = Rope(n_rot, base, scale, neox, magnitude=magnitude, yarn=yarn)
    if SHORT_FACTORS in tensors:  # LongRoPE, whether or not the file names it
        return replace(rope, factors=SHORT_FACTORS, long_factors=LONG_FACTORS, short_context=original)
    return replace(rope, factors=FACTORS if FACTORS in tensors else None)


def _yarn_magnitude(scale: float) -> float:
    """What ggml multiplies cosine and sine by with YaRN: 0.1 ln(1 / scale) + 1."""
    return 1.0 + 0.1 * math.log(1.0 / scale)


def _yarn_attention_factor(meta: Metadata, scale: float) -> float:
    """The magnitude; models with a log multiplier m: that of 1, over that of m."""
    multiplier = meta.number("rope.scaling.yarn_log_multiplier", 0.0)
    if multiplier < 0.0:
        raise meta.error("rope.scaling.yarn_log_multiplier", multiplier, "at least 0")
    stretch = max(0.0, math.log(1.0 / scale))
    return (0.1 * stretch + 1.0) / (0.1 * multiplier * stretch + 1.0)


__all__ = ["LONG_FACTORS", "SHORT_FACTORS", "Rope", "Yarn", "read_rope"]
