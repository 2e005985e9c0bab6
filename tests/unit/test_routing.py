"""Which experts tokens go to, and their rows in the experts' order, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matmul_tools import aligned

from backends.cpu import matmul, routing
from backends.cpu.matmul.layout import BLOCKWISE, FLOATS, SUPERBLOCKWISE

pytestmark = pytest.mark.skipif(not matmul.supported(8, 32, 32), reason="no kernels for this CPU")

K, SHARE_BOUND = 256, 2e-6
ORDERS = st.sampled_from([(FLOATS,), (BLOCKWISE,), (SUPERBLOCKWISE,), (BLOCKWISE, SUPERBLOCKWISE)])


class Router:
    """The two operators' work, by one thread after the other."""

    def __init__(self, experts: int, used: int, kinds: tuple[int, ...], threads: int):
        self.used, self.kinds, self.threads = used, kinds, threads
        self.source_kinds = sorted({*kinds, FLOATS})  # the router's own
        self.scratch, self.count = aligned(threads * routing.SCRATCH_BYTES), np.zeros(1, np.int64)
        self.p = p = np.zeros(routing.P_MATRICES, np.int64)
        p[routing.P_COUNT_AT], p[routing.P_SCRATCH] = self.count.ctypes.data, self.scratch.ctypes.data
        p[routing.P_EXPERTS], p[routing.P_USED], p[routing.P_K] = experts, used, K
        p[routing.P_KINDS] = sum(1 << kind for kind in kinds)
        p[routing.P_SOURCE_KINDS] = sum(1 << kind for kind in self.source_kinds)
        p[routing.P_ROW] = sum(matmul.activation_nbytes(kind, 1, K) for kind in kinds)

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
        size = rows * int(self.p[routing.P_ROW])
        out = aligned(size + 4 * routing.table_words(self.used) * len(x))
        addresses = (source.ctypes.data, self.routes.ctypes.data, out.ctypes.data)
        for i in range(self.threads):
            routing.arrange_share(self.p.ctypes.data, *addresses, i, self.threads)
        return out[:size], out[size:].view(np.int32)


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
        assert first == at and 0 < count <= routing.SEGMENT
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
    ids, shares = Router(5, 2, (BLOCKWISE,), 1).route(logits)
    assert np.isnan(shares[1]).all() and sorted(ids[1]) == [0, 1]
    np.testing.assert_array_equal(shares[[0, 2]], 0.5)


def test_unlikely_experts_are_chosen_last():
    """Only one has a chance above zero, and minus infinity is a logit like any other."""
    logits = np.array([[-np.inf, -200.0, 7.0, -300.0]], np.float32)
    ids, shares = Router(4, 3, (BLOCKWISE,), 1).route(logits)
    assert ids.tolist() == [[2, 0, 1]] and shares.tolist() == [[1.0, 0.0, 0.0]]
