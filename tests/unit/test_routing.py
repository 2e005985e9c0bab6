"""Which experts tokens go to, with which shares, and their rows in the experts' order, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matmul_tools import aligned
from reference_experts import route

from backends.cpu import arranging, expert_words, matmul, routing
from backends.cpu.matmul.layout import BLOCKWISE, FLOATS, SUPERBLOCKWISE
from backends.ggml.models.mixture import Mixture, MixtureOptions

pytestmark = pytest.mark.skipif(not matmul.supported(8, 32, 32), reason="no kernels for this CPU")

K, SHARE_BOUND = 256, 2e-6
ORDERS = st.sampled_from([(FLOATS,), (BLOCKWISE,), (SUPERBLOCKWISE,), (BLOCKWISE, SUPERBLOCKWISE)])


class Router:
    """The two operators' work, by one thread after the other."""

    def __init__(
        self, experts: int, used: int, kinds: tuple[int, ...] = (BLOCKWISE,), threads: int = 1, **words: int
    ):
        """`words`: further parameters by their names, such as P_GATING."""
        self.used, self.kinds, self.threads = used, kinds, threads
        self.source_kinds = sorted({*kinds, FLOATS})  # the router's own
        self.scratch, self.count = aligned(threads * expert_words.SCRATCH_BYTES), np.zeros(1, np.int64)
        self.p = p = np.zeros(expert_words.P_MATRICES, np.int64)
        p[expert_words.P_COUNT_AT], p[expert_words.P_SCRATCH] = (
            self.count.ctypes.data,
            self.scratch.ctypes.data,
        )
        p[expert_words.P_EXPERTS], p[expert_words.P_USED], p[expert_words.P_K] = experts, used, K
        p[expert_words.P_KINDS] = sum(1 << kind for kind in kinds)
        p[expert_words.P_SOURCE_KINDS] = sum(1 << kind for kind in self.source_kinds)
        p[expert_words.P_ROW] = sum(matmul.activation_nbytes(kind, 1, K) for kind in kinds)
        p[expert_words.P_NORMED], p[expert_words.P_SCALE] = 1, float_bits(1.0)
        for name, value in words.items():
            p[getattr(expert_words, name)] = value

    def route(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids, shares), each [T, used], of logits float32 [T, E]."""
        self.count[0] = len(logits)
        self.routes = np.zeros((len(logits), 2 * self.used), np.int32)
        for i in range(self.threads):
            data, out = logits.ctypes.data, self.routes.ctypes.data
            routing.route_share(self.p.ctypes.data, data, out, i, self.threads)
        return self.routes[:, : self.used], self.routes[:, self.used :].view(np.float32)

    def arrange(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows' bytes, table) of the tokens [T, K] that were routed last."""
        source, rows = quantized(x, self.source_kinds), len(x) * self.used
        size = rows * int(self.p[expert_words.P_ROW])
        out = aligned(size + 4 * arranging.table_words(self.used) * len(x))
        addresses = (source.ctypes.data, self.routes.ctypes.data, out.ctypes.data)
        for i in range(self.threads):
            arranging.arrange_share(self.p.ctypes.data, *addresses, i, self.threads)
        return out[:size], out[size:].view(np.int32)


def float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def quantized(x: np.ndarray, kinds: list[int] | tuple[int, ...]) -> np.ndarray:
    """The activations of a batch, in one kind after the other."""
    parts = []
    for kind in kinds:
        parts.append(aligned(matmul.activation_nbytes(kind, len(x), K)))
        matmul.quantize_activations(kind, x.ctypes.data, x.strides[0], len(x), K, parts[-1].ctypes.data, 0, 1)
    return np.concatenate(parts)


def chosen(logits: np.ndarray, used: int) -> tuple[np.ndarray, np.ndarray]:
    chances = np.exp((logits - logits.max(1, keepdims=True)).astype(np.float64))
    ids = np.argsort(-chances, axis=1, kind="stable")[:, :used]
    picked = np.take_along_axis(chances, ids, 1)
    return ids, picked / picked.sum(1, keepdims=True)


@settings(max_examples=60, deadline=None)
@given(
    experts=st.integers(2, 70),
    used=st.integers(1, 8),
    tokens=st.integers(1, 40) | st.just(250),
    kinds=ORDERS,
    threads=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_rows_are_sorted_by_expert_and_quantized_as_batches(experts, used, tokens, kinds, threads, seed):
    used, rng = min(used, experts), np.random.default_rng(seed)
    logits = rng.integers(-3, 4, (tokens, experts)).astype(np.float32)  # with many equals
    x = rng.standard_normal((tokens, K)).astype(np.float32)
    router = Router(experts, used, kinds, threads)
    ids, shares = router.route(logits)
    want_ids, want_shares = chosen(logits, used)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(shares, want_shares, rtol=SHARE_BOUND)

    data, table = router.arrange(x)
    rows = tokens * used
    order = np.argsort(ids.reshape(-1), kind="stable")  # by expert, then by token
    np.testing.assert_array_equal(table[1 + 3 * rows :][:rows], order // used)
    np.testing.assert_array_equal(table[1 + 4 * rows :][:rows].view(np.float32), shares.reshape(-1)[order])
    segments, at = table[1:][: 3 * table[0]].reshape(-1, 3), 0
    for expert, first, count in segments:
        assert first == at and 0 < count <= expert_words.SEGMENT
        assert (ids.reshape(-1)[order[first : first + count]] == expert).all()
        tokens_of = np.ascontiguousarray(x[order[first : first + count] // used])
        before = 0
        for kind in kinds:
            size = matmul.activation_nbytes(kind, 1, K)
            part = data[rows * before + first * size : rows * before + (first + count) * size]
            np.testing.assert_array_equal(part, quantized(tokens_of, [kind]))
            before += size
        at += count
    assert at == rows
    assert len({*segments[:, 0]}) == len({*ids.reshape(-1)})


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_without_finite_logits_has_no_shares(bad):
    logits = np.zeros((3, 5), np.float32)
    logits[1] = bad
    ids, shares = Router(5, 2).route(logits)
    assert np.isnan(shares[1]).all() and sorted(ids[1]) == [0, 1]
    np.testing.assert_array_equal(shares[[0, 2]], 0.5)


def test_unlikely_experts_are_chosen_last():
    """Only one has a chance above zero, and minus infinity is a logit like any other."""
    logits = np.array([[-np.inf, -200.0, 7.0, -300.0]], np.float32)
    ids, shares = Router(4, 3).route(logits)
    assert ids.tolist() == [[2, 0, 1]] and shares.tolist() == [[1.0, 0.0, 0.0]]


@settings(max_examples=60, deadline=None)
@given(
    gating=st.sampled_from(sorted(expert_words.GATINGS)),
    groups=st.sampled_from([1, 2, 4]),
    normed=st.booleans(),
    selected=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    used=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_every_way_to_choose_and_to_weigh(gating, groups, normed, selected, scale, used, seed):
    experts, rng = 16, np.random.default_rng(seed)
    logits = rng.standard_normal((9, experts)).astype(np.float32) * 2
    selection = rng.standard_normal(experts).astype(np.float32)
    mixture = Mixture(
        MixtureOptions(), experts, used, 32, 0, gating, normed, scale, groups, max(1, groups // 2), 0
    )
    ids, shares = Router(
        experts,
        used,
        P_GATING=expert_words.GATINGS[gating],
        P_NORMED=int(normed),
        P_SCALE=float_bits(scale),
        P_GROUPS=groups,
        P_GROUPS_USED=mixture.groups_used,
        P_SELECTION_BIAS=selection.ctypes.data if selected else 0,
    ).route(logits)
    want_ids, want_shares = route(logits, mixture, selection if selected else None)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(shares, want_shares, rtol=1e-5)
