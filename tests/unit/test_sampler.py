"""The fused sampler against a plain numpy reference."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.sampling import kernels
from hetero.sampling.params import SamplingParams
from hetero.sampling.sampler import Sampler, SamplerState

EXP_ERROR = 1e-15  # relative, of kernels.exp_shifted


def process(x: np.ndarray, state: SamplerState, mask: np.ndarray | None) -> np.ndarray:
    """Reference: bias, penalties and grammar mask, in float32 as the kernel does."""
    x = x.copy()
    p = state.params
    for token_id, bias in p.logit_bias.items():
        x[token_id] += np.float32(bias)
    for token_id, count in zip(*state.seen, strict=True):
        r = np.float32(p.repetition_penalty)
        x[token_id] = x[token_id] / r if x[token_id] > 0 else x[token_id] * r
        if count:
            x[token_id] -= np.float32(p.frequency_penalty * count + p.presence_penalty)
    if mask is not None:
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(x)]
        x[bits == 0] = -np.inf
    return x


def distribution(x: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Reference: probabilities after temperature and the filters, by a full sort."""
    order = np.lexsort((np.arange(len(x)), -x.astype(np.float64)))
    with np.errstate(invalid="ignore", over="ignore"):
        weights = np.exp((x.astype(np.float64) - float(x.max())) / p.temperature)
    weights[np.isneginf(x)] = 0.0
    if p.top_k:
        weights[order[p.top_k :]] = 0.0
    if p.top_p < 1.0:
        cum = np.cumsum(weights[order])
        weights[order[np.searchsorted(cum, p.top_p * cum[-1] * (1 - 1e-12)) + 1 :]] = 0.0
    weights[weights < p.min_p] = 0.0
    return weights / weights.sum()


def sample_one(
    x: np.ndarray, mask: np.ndarray | None = None, prompt: tuple[int, ...] = (), **params: Any
) -> int:
    state = SamplerState(SamplingParams(**params), prompt, len(x))
    return Sampler(len(x)).sample(x[None].copy(), [state], [mask])[0].token_id


def allow(n_vocab: int, ids: Any) -> np.ndarray:
    bits = np.zeros((n_vocab + 31) // 32 * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_support_and_draw_match_the_reference(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([1, 2, 31, 33, 511, 512, 513, 1500]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    x = rng.normal(0, data.draw(st.sampled_from([0.0, 0.5, 3.0, 30.0])), n).astype(np.float32)
    if data.draw(st.booleans()):
        x = np.round(x)  # many equal logits
    if data.draw(st.booleans()):
        x[rng.random(n) < 0.3] = -np.inf
        x[rng.integers(n)] = 0.0
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([1e-320, 1e-3, 0.7, 1.0, 100.0])),
        top_k=data.draw(st.sampled_from([0, 1, 2, 40, n, n + 5])),
        top_p=data.draw(st.sampled_from([0.0, 1e-9, 0.5, 0.9, 0.999, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3, 0.5])),
        presence_penalty=data.draw(st.sampled_from([0.0, 1.0, -2.0])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.5, -0.5])),
        logit_bias=data.draw(
            st.dictionaries(st.integers(0, n - 1), st.floats(-100, 100, width=32), max_size=3)
        ),
        seed=data.draw(st.integers(-(2**70), 2**70)),
    )
    state = SamplerState(params, rng.integers(0, n, 5).tolist(), n)
    for token_id in rng.integers(0, n, 100).tolist():
        state.accept(token_id)
        state.check_invariants()
    mask = allow(n, rng.integers(0, n, 1 + n // 2)) if data.draw(st.booleans()) else None
    processed = process(x, state, mask)
    u = kernels.uniform(np.uint64(state.seed), np.uint64(state.position))
    got = Sampler(n).sample(x[None].copy(), [state], [mask])[0]
    if processed.max() == -np.inf:
        assert got.token_id == -1 and got.error
        return
    probs = distribution(processed, params)
    cum = np.cumsum(probs)
    assert probs[got.token_id] > 0, "a token outside of the filters"
    assert cum[got.token_id] >= u - 1e-9 and cum[got.token_id] - probs[got.token_id] <= u + 1e-9
    state.check_invariants()


@given(st.integers(0, 2**32), st.sampled_from([7, 512, 2000]), st.sampled_from([1, 3, 64]))
@settings(max_examples=30, deadline=None)
def test_greedy_takes_the_lowest_id_among_the_largest(seed: int, n: int, levels: int) -> None:
    x = np.random.default_rng(seed).integers(-levels, levels, n).astype(np.float32)
    assert sample_one(x, temperature=0.0) == int(np.argmax(x))


@given(st.integers(0, 2**32), st.sampled_from([1, 5, 700, 3000]))
@settings(max_examples=40, deadline=None)
def test_cutoff_is_the_shortest_prefix(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    x = np.round(rng.normal(0, 4, n), int(rng.integers(0, 4))).astype(np.float32)
    keys, p = np.empty(n, np.uint32), np.empty(n)
    kernels.order_keys(x, keys)
    kernels.exp_shifted(x, float(x.max()), 1.0, p)
    assert np.array_equal(np.argsort(keys, kind="stable"), np.argsort(x, kind="stable"))
    order = np.lexsort((np.arange(n), -x))
    count = int(rng.integers(1, n + 1))
    kept = p.copy()
    kernels.keep_prefix(keys, kept, *kernels.cutoff(keys, p, count, np.inf))
    assert set(np.flatnonzero(kept)) == set(order[:count])


def test_exp_is_exact_to_its_bound() -> None:
    x = np.concatenate([np.linspace(-700, 0, 100_001), [-705.0, -1e30, -np.inf]]).astype(np.float32)
    out = np.empty(len(x))
    kernels.exp_shifted(x, 0.0, 1.0, out)
    want = np.exp(x.astype(np.float64))
    assert np.all(np.abs(out[:-3] - want[:-3]) <= EXP_ERROR * want[:-3])
    assert np.all(out[-3:] == 0)


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1, "temperature": 1.7}])
def test_distribution_by_chi_square(params: dict[str, Any]) -> None:
    n, draws = 40, 20_000
    x = np.random.default_rng(5).normal(0, 1.5, n).astype(np.float32)
    settings_ = SamplingParams(**params)
    probs = distribution(x, settings_)
    states = [SamplerState(SamplingParams(**params, seed=seed), (), n) for seed in range(draws)]
    results = Sampler(n).sample(np.tile(x, (draws, 1)), states, [None] * draws)
    seen = np.bincount([r.token_id for r in results], minlength=n)
    assert seen[probs == 0].sum() == 0
    live = probs > 0
    chi2 = float(((seen[live] - draws * probs[live]) ** 2 / (draws * probs[live])).sum())
    dof = int(live.sum()) - 1
    assert chi2 < dof + 4.5 * np.sqrt(2 * dof) + 5  # p of about 1e-4 or less


def test_positions_of_one_seed_are_independent_draws() -> None:
    u = np.array([kernels.uniform(np.uint64(9), np.uint64(i)) for i in range(20_000)])
    assert abs(u.mean() - 0.5) < 0.01 and abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
    seeds = np.array([kernels.uniform(np.uint64(i), np.uint64(0)) for i in range(20_000)])
    assert abs(seeds.mean() - 0.5) < 0.01 and len(set(seeds.tolist())) == 20_000


def test_a_row_does_not_depend_on_the_others() -> None:
    n = 5000
    rng = np.random.default_rng(1)
    x = rng.normal(0, 3, (8, n)).astype(np.float32)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 7, "logprobs": 3}, {"min_p": 0.05},
        {"repetition_penalty": 1.2, "temperature": 0.0}, {"logit_bias": {3: 20.0}}, {"logprobs": 0},
    ]  # fmt: skip
    masks = [None, None, allow(n, range(0, n, 3)), None, None, allow(n, [4, 9]), None, None]
    sampler = Sampler(n)

    def states() -> list[SamplerState]:
        return [SamplerState(SamplingParams(seed=i, **k), (1, 2), n) for i, k in enumerate(kinds)]

    together = sampler.sample(x.copy(), states(), masks)
    alone = [sampler.sample(x[i : i + 1].copy(), [s], [masks[i]])[0] for i, s in enumerate(states())]
    backwards = sampler.sample(x[::-1].copy(), states()[::-1], masks[::-1])[::-1]
    assert together == alone == backwards


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"logprobs": 1}])
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: dict[str, Any]) -> None:
    for at in (0, 600, 1029):  # in the first block, inside, and in the tail
        x = np.zeros((3, 1030), np.float32)
        x[1, at] = bad
        states = [SamplerState(SamplingParams(**params), (), 1030) for _ in range(3)]
        results = Sampler(1030).sample(x, states, [None] * 3)
        assert [r.error is None for r in results] == [True, False, True]
        assert results[1].token_id == -1 and results[1].logprob is None
        assert [s.position for s in states] == [1, 0, 1], "a failed row does not advance"


def test_all_banned_is_an_error() -> None:
    state = SamplerState(SamplingParams(), (), 64)
    (result,) = Sampler(64).sample(np.zeros((1, 64), np.float32), [state], [allow(64, [])])
    assert result.token_id == -1 and "response format" in (result.error or "")
    (result,) = Sampler(64).sample(np.full((1, 64), -np.inf, np.float32), [state], [None])
    assert result.token_id == -1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_mask_and_bias_decide(temperature: float) -> None:
    x = np.random.default_rng(2).normal(0, 3, 1000).astype(np.float32)
    for token_id in (0, 31, 32, 999):
        assert sample_one(x, allow(1000, [token_id]), temperature=temperature) == token_id
        assert sample_one(x, temperature=temperature, logit_bias={token_id: 100.0}) == token_id
    best = int(np.argmax(x))
    assert sample_one(x, temperature=temperature, logit_bias={best: -100.0}) != best


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    x = np.random.default_rng(3).normal(0, 3, 3001).astype(np.float32)
    want = x.astype(np.float64) - np.log(np.exp(x.astype(np.float64)).sum())
    params = SamplingParams(temperature=0.5, top_k=3, logit_bias={17: 100.0}, logprobs=20)
    (got,) = Sampler(3001).sample(x[None].copy(), [SamplerState(params, (), 3001)], [None])
    assert got.token_id == 17 and got.logprob is not None
    assert got.logprob.token_id == 17 and got.logprob.logprob == pytest.approx(want[17], abs=1e-9)
    order = np.argsort(-want, kind="stable")[:20]
    assert [t for t, _ in got.logprob.top] == order.tolist()
    assert [v for _, v in got.logprob.top] == pytest.approx(want[order].tolist(), abs=1e-9)
    none = SamplingParams(temperature=0.0, logprobs=0)
    (got,) = Sampler(3001).sample(x[None].copy(), [SamplerState(none, (), 3001)], [None])
    assert got.logprob is not None and got.logprob.top == []


def test_penalties_act_on_what_they_should() -> None:
    x = np.array([2.0, 1.9, -1.0, 0.0], np.float32)
    assert sample_one(x, prompt=(0,), temperature=0.0, repetition_penalty=1.5) == 1
    assert sample_one(x, prompt=(0,), temperature=0.0, presence_penalty=2.0) == 0, "prompt tokens are exempt"
    state = SamplerState(SamplingParams(temperature=0.0, frequency_penalty=0.08), (0,), 4)
    sampler = Sampler(4)
    tokens = [sampler.sample(x[None].copy(), [state], [None])[0].token_id for _ in range(5)]
    assert tokens == [0, 0, 1, 0, 1]
    state.check_invariants()


def test_seeds() -> None:
    x = np.zeros(50_000, np.float32)

    def text(seed: int | None) -> list[int]:
        state = SamplerState(SamplingParams(seed=seed), (), len(x))
        sampler = Sampler(len(x))
        return [sampler.sample(x[None].copy(), [state], [None])[0].token_id for _ in range(6)]

    assert text(42) == text(42) == text(42 + 2**64)
    assert len({tuple(text(seed)) for seed in [*range(8), -1, None, None]}) == 11


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Sampler(8).sample(np.zeros((1, 9), np.float32), [SamplerState(SamplingParams(), (), 8)], [None])
    assert Sampler(8).sample(np.zeros((0, 8), np.float32), [], []) == []


def test_greedy_is_fast() -> None:
    """Far above what it takes (0.02 ms per row), far below a step."""
    n = 49152
    sampler = Sampler(n)
    sampler.warmup()
    x = np.random.default_rng(0).normal(0, 3, (16, n)).astype(np.float32)
    states = [SamplerState(SamplingParams(temperature=0.0), (), n) for _ in range(16)]
    times = []
    for _ in range(5):
        start = time.perf_counter()
        sampler.sample(x, states, [None] * 16)
        times.append(time.perf_counter() - start)
    assert min(times) / 16 < 1e-3
