"""The operators of gated delta nets against numpy: states begin, go on, are left behind and shared."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest
from distance import relative

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from driver import Driver
from tiny_hybrid import tiny_hybrid

from backends.cpu import delta_net as net
from backends.ggml.lib import TENSOR_WORDS, WORD_DATA, WORD_SRC, ggml
from backends.ggml.models.delta_net import DeltaNet
from backends.ggml.recurrent import state_segments
from backends.ggml.state_layout import lay_out_states
from hetero.batch import Batch

BOUND = 2e-6  # of norms, in float32 against float64
COUNTS = [5, 1, 20, 3]  # rows of four sequences
SOURCES = [0, 3, 4, 4]
WRITES = [(0, 1, 5), (0, 5, 6), (1, 1, 3), (2, 7, 7), (2, 16, 8)]  # the last one keeps nothing


def batch() -> Batch:
    cu = np.concatenate([[0], np.cumsum(COUNTS)]).astype(np.int32)
    none = np.zeros(0, np.int32)
    return Batch(
        0, none, np.zeros(cu[-1], np.int32), [], [], np.array(COUNTS, np.int32), cu, none, [],
        state_sources=np.array(SOURCES, np.int32), state_writes=np.array(WRITES, np.int32),
    )  # fmt: skip


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class Reference:
    """One layer in float64. A state: last inputs [taps - 1, channels], matrices [heads, dim, dim]."""

    def __init__(self, sizes: DeltaNet, eps: float, taps: np.ndarray, dt, a, norm):
        self.sizes, self.eps, self.taps, self.dt, self.a, self.norm = sizes, eps, taps, dt, a, norm

    def row(self, qkv, z, alpha, beta, conv, matrix):
        """(output [value width], conv, matrix) of one token."""
        s = self.sizes
        window = np.concatenate([conv, qkv[None]])
        mixed = (window * self.taps.T).sum(0)
        mixed = mixed * sigmoid(mixed)
        heads = mixed.reshape(-1, s.dim)
        q, k, v = np.split(heads, [s.key_heads, 2 * s.key_heads])
        q, k = (h / np.sqrt((h**2).sum(-1, keepdims=True) + self.eps) for h in (q, k))
        share = np.arange(s.value_heads) % s.key_heads
        q, k = q[share] / np.sqrt(s.dim), k[share]
        decay = np.exp(np.log1p(np.exp(alpha + self.dt)) * self.a)
        matrix = matrix * decay[:, None, None]
        delta = (v - np.einsum("hij,hj->hi", matrix, k)) * sigmoid(beta)[:, None]
        matrix = matrix + delta[:, :, None] * k[:, None, :]
        y = np.einsum("hij,hj->hi", matrix, q)
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + self.eps) * self.norm
        return y.ravel() * z * sigmoid(z), window[1:], matrix


class Layer:
    """Layer 0 of a tiny model on `threads` threads, its pools as arrays."""

    def __init__(self, path: Path, threads: int):
        self.driver, self.threads = Driver(path, num_blocks=9, max_tokens=64, threads=threads), threads
        self.states, self.sizes = self.driver.stage._layers.states, self.driver.config.delta_net
        s, slots = self.sizes, 9
        conv, matrix = self.states._places[0]
        self.conv = view(conv, (slots, s.taps - 1, s.conv_width))
        self.matrix = view(matrix, (slots, s.value_heads, s.dim // 16, s.dim, 16))
        rng = np.random.default_rng(1)
        self.conv[1:] = rng.standard_normal(self.conv[1:].shape)
        self.matrix[1:] = rng.standard_normal(self.matrix[1:].shape)
        read = lambda name, shape: view(ggml().get_data(self._tensor(name)), shape).astype(np.float64)  # noqa: E731
        self.reference = Reference(
            s,
            self.driver.config.norm_eps,
            read("ssm_conv1d.weight", (s.conv_width, s.taps)),
            read("ssm_dt.bias", (s.value_heads,)),
            read("ssm_a", (s.value_heads,)),
            read("ssm_norm.weight", (s.dim,)),
        )

    def _tensor(self, name: str) -> int:
        return self.driver.stage._layers.weights.tensor(f"blk.0.{name}")

    def run(self, parts: list[np.ndarray], step: Batch, fused: bool, padding: int) -> np.ndarray:
        """The three operators, as ggml's threads would run them, over rows with padding behind them."""
        s, rows = self.sizes, len(parts[0]) + padding
        parts = [np.concatenate([p, np.full((padding, p.shape[1]), np.nan, np.float32)]) for p in parts]
        sources = [np.ascontiguousarray(np.concatenate(parts, axis=1))] if fused else parts
        widths = [[p.shape[1] for p in parts]] if fused else [[p.shape[1]] for p in parts]
        p = self.states.parameters(0, widths)
        self.states.set(step)
        mixed = np.full((rows, s.conv_width + 2 * s.value_heads), np.nan, np.float32)
        y, out = (np.full((rows, s.value_width), np.nan, np.float32) for _ in range(2))
        for operator, target, read in (
            (net.convolve_operator, mixed, sources),
            (net.advance_operator, y, [mixed]),
            (net.gate_operator, out, [y, *sources]),
        ):
            nodes = [node(array) for array in read]
            this = node(target, nodes)
            for ith in range(self.threads):
                operator.ctypes(this.ctypes.data, ith, self.threads, p.ctypes.data)
        return out


def view(address: int, shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape))
    return np.frombuffer((ctypes.c_float * size).from_address(address), np.float32).reshape(shape)


def node(array: np.ndarray, sources: list[np.ndarray] | tuple = ()) -> np.ndarray:
    """The words of a ggml tensor [columns, rows] that operators read."""
    words = np.zeros(TENSOR_WORDS, np.int64)
    words[2:4], words[6:8] = array.shape[::-1], (4, 4 * array.shape[1])
    words[WORD_DATA] = array.ctypes.data
    words[WORD_SRC : WORD_SRC + len(sources)] = [s.ctypes.data for s in sources]
    return words


@pytest.mark.parametrize(("fused", "threads"), [(True, 1), (False, 3)])
@pytest.mark.parametrize("options", [{}, {"key_heads": 1, "value_heads": 3, "state_dim": 48, "taps": 3}])
def test_operators(tmp_path, fused, threads, options):
    layer = Layer(tiny_hybrid(tmp_path / "m.gguf", **options), threads)
    s, rng, rows = layer.sizes, np.random.default_rng(2), sum(COUNTS)
    widths = (s.conv_width, s.value_width, s.value_heads, s.value_heads)
    parts = [rng.standard_normal((rows, width)).astype(np.float32) for width in widths]
    conv, matrix = layer.conv.copy(), layer.matrix.copy()
    got = layer.run(parts, batch(), fused, padding=3)
    assert not got[rows:].any(), "padding rows are zero"
    at = 0
    for i, (count, source) in enumerate(zip(COUNTS, SOURCES, strict=True)):
        targets = {n: slot for sequence, n, slot in WRITES if sequence == i}
        state = conv[source].astype(np.float64), whole(matrix[source])
        for n in range(1, count + 1):
            row = [part[at].astype(np.float64) for part in parts]
            want, *state = layer.reference.row(*row, *state)
            assert relative(got[at], want) <= BOUND, f"row {n} of sequence {i}"
            if n in targets:
                assert relative(layer.conv[targets[n]], state[0]) <= BOUND
                assert relative(whole(layer.matrix[targets[n]]), state[1]) <= BOUND
            at += 1
    written = {slot for _, _, slot in WRITES}
    for slot in set(range(9)) - written:
        np.testing.assert_array_equal(layer.matrix[slot], matrix[slot])
        np.testing.assert_array_equal(layer.conv[slot], conv[slot])
    layer.driver.close()


def whole(units: np.ndarray) -> np.ndarray:
    """[heads, dim, dim] of the pool's [heads, units, dim, 16]."""
    heads, count, dim, lanes = units.shape
    return units.transpose(0, 1, 3, 2).reshape(heads, count * lanes, dim).astype(np.float64)


def test_a_row_that_is_no_number_stays_in_its_sequence(tmp_path):
    layer = Layer(tiny_hybrid(tmp_path / "m.gguf"), 2)
    s, rng, rows = layer.sizes, np.random.default_rng(2), sum(COUNTS)
    widths = (s.conv_width, s.value_width, s.value_heads, s.value_heads)
    parts = [rng.standard_normal((rows, width)).astype(np.float32) for width in widths]
    conv, matrix = layer.conv.copy(), layer.matrix.copy()
    clean = layer.run(parts, batch(), True, 0)
    layer.conv[:], layer.matrix[:] = conv, matrix
    for part in parts:
        part[7] = np.nan  # of sequence 2
    got = layer.run(parts, batch(), True, 0)
    assert np.isnan(got[7:26]).any()
    np.testing.assert_array_equal(np.delete(got, range(6, 26), 0), np.delete(clean, range(6, 26), 0))
    layer.driver.close()


def test_segments():
    found = state_segments(batch())
    assert found.tolist() == [
        [0, 0, 1, 0, 5],
        [0, 1, 4, 5, 6],
        [1, 5, 1, 3, 3],
        [2, 6, 7, 4, 7],
        [2, 13, 9, 7, 8],
        [2, 22, 4, 8, 0],
        [3, 26, 3, 4, 0],
    ]


def test_segments_of_plain_operators_cover_all_rows_once():
    step, taps, nowhere = batch(), 4, 9
    layout = lay_out_states(step, taps, nowhere, 32)
    assert [len(wave) for wave in layout.waves] == [3, 2, 1]
    rows = np.concatenate([b.order[b.real > 0] for b in layout.batches])
    assert sorted(rows.tolist()) == list(range(sum(COUNTS)))
    every = np.concatenate([b.order for b in layout.batches])
    real = np.concatenate([b.real for b in layout.batches])
    np.testing.assert_array_equal(every[layout.place[: sum(COUNTS)]], np.arange(sum(COUNTS)))
    assert real[layout.place[: sum(COUNTS)]].all()
    targets = np.concatenate([b.targets for b in layout.batches]).tolist()
    assert sorted(t for t in targets if t != nowhere) == [3, 5, 6, 7, 8] and 0 not in targets
    shapes = [shape for wave in layout.waves for shape in wave]
    for (n, r), each in zip(shapes, layout.batches, strict=True):
        assert each.order.size == n * r and each.tails.size == n * (taps - 1)
        assert each.tails.max() < n * (taps - 1 + r)
