"""The largest logit as the graph finds it, against numpy and against the sampler's own search."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from backends.cpu.argmax import argmax_share
from hetero.sampling.params import SamplingParams
from hetero.sampling.sampler import Sampler, SamplerState

VALUES = st.sampled_from([0.0, -0.0, 1.0, 1.5, -3.0, 7.25, 7.25, float("-inf"), float("inf"), float("nan")])


def found(logits: np.ndarray, threads: int = 2) -> np.ndarray:
    out = np.full(len(logits), 99, np.int32)
    for ith in range(threads):
        argmax_share(logits.ctypes.data, logits.shape[1], len(logits), out.ctypes.data, ith, threads)
    return out


@settings(deadline=None)  # the first call compiles
@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 70)), elements=VALUES))
def test_like_the_sampler(logits):
    greedy = SamplingParams(temperature=0.0)

    def sample(argmax):
        states = [SamplerState(greedy, [1], logits.shape[1]) for _ in logits]
        results = Sampler(logits.shape[1]).sample(logits.copy(), states, [None] * len(states), argmax)
        return [(r.token_id, r.error) for r in results]

    assert sample(found(logits)) == sample(None)


def test_a_whole_vocabulary():
    logits = np.random.default_rng(0).standard_normal((7, 49152)).astype(np.float32)
    np.testing.assert_array_equal(found(logits), logits.argmax(1))
    logits[3, [17, 40000]] = 50.0
    assert found(logits)[3] == 17


def test_only_plain_greedy_requests_use_it():
    logits = np.arange(64, dtype=np.float32)[None]
    for params in (
        SamplingParams(temperature=0.0, logit_bias={5: 100.0}),
        SamplingParams(temperature=0.0, logprobs=1),
        SamplingParams(temperature=0.0, repetition_penalty=1.2),
        SamplingParams(temperature=1.0, seed=1),
    ):
        assert not SamplerState(params, [1], 64).plain
    state = SamplerState(SamplingParams(temperature=0.0, logit_bias={5: 100.0}), [1], 64)
    assert Sampler(64).sample(logits, [state], [None], np.array([63], np.int32))[0].token_id == 5
