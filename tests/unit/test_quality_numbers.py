"""Comparing two models: the numbers, against plain references."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from quality_tools import compared

from quant.quality import Bounds, Comparison, Estimate, NotFiniteError, Summary

ROUNDING = 1e-12  # relative to the logits: float64 has 2^-53 for each of some 1e3 operations


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """[L, V], in long doubles where the machine has them."""
    x = logits.astype(np.longdouble)
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def reference(first: np.ndarray, second: np.ndarray, targets: np.ndarray) -> dict[str, Any]:
    """What the definitions say, written out."""
    p, q = log_softmax(first), log_softmax(second)
    rows = np.arange(len(targets))
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    same = [int(np.argmax(a)) == int(np.argmax(b)) for a, b in zip(first, second, strict=True)]
    return {"nll": (-p[rows, targets], -q[rows, targets]), "kl": kl, "top1": sum(same) / len(same)}


@st.composite
def comparisons(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, width = draw(st.integers(1, 11)), draw(st.integers(1, 40))
    scale = draw(st.sampled_from([1e-3, 1.0, 30.0, 1e4]))
    values = st.floats(-1, 1, width=32)
    first, second = (draw(hnp.arrays(np.float32, (rows, width), elements=values)) for _ in range(2))
    targets = draw(hnp.arrays(np.int64, rows, elements=st.integers(0, width - 1)))
    return first * np.float32(scale), second * np.float32(scale), targets


@given(comparisons())
def test_all_numbers_are_what_the_definitions_say(case):
    first, second, targets = case
    want, found = reference(*case), compared(*case)
    bound = ROUNDING * max(1.0, float(np.abs(first).max()), float(np.abs(second).max()))
    kl = want["kl"].astype(float)
    assert found.tokens == len(targets)
    assert found.top1 == want["top1"]
    assert found.kl_mean.value == pytest.approx(kl.mean(), abs=bound)
    assert found.kl_p90 == pytest.approx(np.quantile(kl, 0.9), abs=bound)
    assert found.kl_p99 == pytest.approx(np.quantile(kl, 0.99), abs=bound)
    assert found.kl_max == pytest.approx(kl.max(), abs=bound) and found.kl_max >= 0
    for estimate, nll in zip((found.reference_ppl, found.other_ppl), want["nll"], strict=True):
        with np.errstate(over="ignore"):
            ppl = float(np.exp(nll.astype(float).mean()))
        assert estimate.value == pytest.approx(ppl, rel=bound)


@given(comparisons(), st.integers(1, 5))
def test_cutting_into_chunks_changes_nothing(case, size: int):
    comparison = Comparison()
    for start in range(0, len(case[2]), size):
        comparison.add(*(part[start : start + size] for part in case))
        comparison.check_invariants()
    assert comparison.summary() == compared(*case)


@given(comparisons())
def test_a_model_is_no_distance_from_itself(case):
    found = compared(case[0], case[0].copy(), case[2])
    assert (found.kl_mean, found.kl_max, found.top1) == (Estimate(0.0, 0.0), 0.0, 1.0)
    assert found.reference_ppl == found.other_ppl
    assert found.ppl_ratio == Estimate(1.0, 0.0)


def test_known_values():
    even, sure = np.zeros((3, 8), np.float32), np.zeros((3, 8), np.float32)
    sure[:, 2] = math.log(7)  # half of the probability
    found = compared(even, sure, np.array([2, 2, 0]))
    assert found.reference_ppl.value == pytest.approx(8)
    assert found.reference_ppl.error == pytest.approx(0, abs=1e-12)
    assert found.other_ppl.value == pytest.approx((2 * 2 * 14) ** (1 / 3))
    logs = [math.log(2), math.log(2), math.log(14)]
    assert found.other_ppl.error == pytest.approx(found.other_ppl.value * np.std(logs, ddof=1) / 3**0.5)
    assert found.kl_mean.value == pytest.approx(math.log(2 / 8) / 8 + 7 / 8 * math.log(14 / 8))
    assert found.top1 == 0  # of equals, the first counts


def test_nothing_added_has_no_summary():
    comparison = Comparison()
    comparison.add(*[np.empty((0, 4), np.float32)] * 2, np.empty(0, np.int64))
    comparison.check_invariants()
    assert comparison.tokens == 0
    with pytest.raises(ValueError, match="no positions"):
        comparison.summary()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("of_reference", [True, False])
def test_logits_that_are_not_finite_are_refused(value: float, of_reference: bool):
    good, bad = np.zeros((3, 4), np.float32), np.zeros((3, 4), np.float32)
    bad[1, 2] = value
    comparison = Comparison()
    with pytest.raises(NotFiniteError) as caught:
        comparison.add(*((bad, good) if of_reference else (good, bad)), np.zeros(3, int))
    assert (caught.value.of_reference, caught.value.row) == (of_reference, 1)
    assert comparison.tokens == 0


FOUND = Summary(
    9, Estimate(10, 1), Estimate(11, 1), Estimate(1.1, 0.1), Estimate(0.05, 0.0), 0.1, 0.2, 0.3, 0.9
)


@pytest.mark.parametrize(
    ("bounds", "named"),
    [
        (Bounds(), []),
        (Bounds(max_kl=0.05, max_ppl_ratio=1.1, min_top1=0.9), []),
        (Bounds(max_kl=0.049), ["--max-kl 0.049: "]),
        (Bounds(max_ppl_ratio=1.09), ["--max-ppl-ratio 1.09: "]),
        (Bounds(min_top1=0.91), ["--min-top1 0.91: "]),
        (Bounds(0.0, 1.0, 1.0), ["--max-kl 0: ", "--max-ppl-ratio 1: ", "--min-top1 1: "]),
        (
            Bounds(math.nan, math.nan, math.nan),
            ["--max-kl nan: ", "--max-ppl-ratio nan: ", "--min-top1 nan: "],
        ),
    ],
)
def test_bounds(bounds: Bounds, named: list[str]):
    lines = bounds.broken(FOUND)
    assert [line[: len(name)] for line, name in zip(lines, named, strict=True)] == named
