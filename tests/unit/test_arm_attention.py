"""Stores, scores and sums of coded keys and values, compiled for ARM, in an emulator: this CPU's bits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("unicorn", reason="the ARM emulator is not installed")
from arm_tools import DATA, compile_arm, run_arm

from backends.cpu import attention_pools, kv_codes, kv_store

DIM, BLOCKS = 64, 4
CHUNK = 16 * BLOCKS


class Stored(NamedTuple):
    kind: int
    rows: np.ndarray  # float32 [CHUNK, DIM]
    parts: list[np.ndarray]  # of keys, of values: uint8 [BLOCKS, bytes], made by this CPU


@pytest.fixture(scope="module", params=["fp8", "q8_0"])
def stored(request: pytest.FixtureRequest) -> Stored:
    kind, rng = kv_codes.FORMATS[request.param], np.random.default_rng(0)
    rows = (3 * rng.standard_normal((CHUNK, DIM))).astype(np.float32)
    parts = []
    for which in (kv_store.KEYS, kv_store.VALUES):
        store = kv_store.compiled_store(kind, which).ctypes
        parts.append(np.zeros((BLOCKS, kv_codes.part_bytes(request.param, DIM)), np.uint8))
        for token, row in enumerate(rows):
            store(parts[-1][token // 16].ctypes.data, token % 16, row.ctypes.data, DIM // 16)
    return Stored(kind, rows, parts)


def places(arrays: list[np.ndarray]) -> list[int]:
    """Where run_arm puts them."""
    ends = np.cumsum([-(-a.nbytes // 64) * 64 + 65536 for a in arrays])
    return [DATA, *(DATA + int(end) for end in ends[:-1])]


def addresses(start: int, array: np.ndarray) -> np.ndarray:
    """Of an array's rows, were it at `start`."""
    return start + array.strides[0] * np.arange(len(array), dtype=np.int64)


@pytest.mark.parametrize("which", [kv_store.KEYS, kv_store.VALUES])
def test_a_row_is_stored(stored: Stored, which: int):
    elf = compile_arm(lambda x, *values: kv_store.emit_row(x, stored.kind, which, *values), 4)
    got = np.zeros_like(stored.parts[which][0])
    for token in range(16):
        run_arm(elf, [got, token, stored.rows[token].copy(), DIM // 16])
    np.testing.assert_array_equal(got, stored.parts[which][0])


def test_scores(stored: Stored):
    queries = np.random.default_rng(1).standard_normal((3, DIM)).astype(np.float32)
    keys = stored.parts[0]
    want, got = np.zeros((2, 3, CHUNK), np.float32)
    here = [addresses(a.ctypes.data, a) for a in (queries, keys)]
    attention_pools.compiled_scores(stored.kind).ctypes(
        here[0].ctypes.data, here[1].ctypes.data, here[1].ctypes.data, want.ctypes.data, DIM, 3, BLOCKS
    )
    variant = attention_pools.variant(stored.kind, BLOCKS)
    elf = compile_arm(lambda x, *values: attention_pools.emit_scores(x, 3, variant, *values[:5]), 7)
    _, _, _, _, queries_at, keys_at = places([here[0], here[1], here[1], got, queries, keys])
    there = [addresses(queries_at, queries), addresses(keys_at, keys)]
    run_arm(elf, [there[0], there[1], there[1].copy(), got, DIM, queries, keys])
    assert got.any()
    np.testing.assert_array_equal(got, want)


def test_weighted_values(stored: Stored):
    weights = np.random.default_rng(2).uniform(0, 1, CHUNK).astype(np.float32)
    values = stored.parts[1]
    scales = values[:, 16 * DIM :].view(np.float16).astype(np.float32).reshape(BLOCKS, -1, 16)
    scales = scales.swapaxes(0, 1).reshape(-1, CHUNK)
    if stored.kind == kv_codes.FP8:
        scales = scales * np.float32(kv_codes.FP8_FACTOR)
    scaled = np.zeros((2, attention_pools.VALUE_ROWS, CHUNK), np.float32)
    scaled[: len(scales), 0] = weights * scales
    want, got = np.zeros((2, 1, DIM), np.float32)
    outs, parts = addresses(want.ctypes.data, want), addresses(values.ctypes.data, values)
    spare = np.zeros(attention_pools.SPARE_BYTES, np.uint8)
    attention_pools.compiled_values(stored.kind).ctypes(
        weights.ctypes.data,
        parts.ctypes.data,
        parts.ctypes.data,
        outs.ctypes.data,
        DIM,
        1,
        CHUNK,
        spare.ctypes.data,
    )
    variant = attention_pools.variant(stored.kind, 4)
    elf = compile_arm(
        lambda x, *v: attention_pools.emit_weighted_values(
            x, 1, variant, *v[:4], x.const(0), x.const(CHUNK), x.const(DIM)
        ),
        6,
    )
    *_, got_at, values_at = places([scaled, parts, parts, outs, got, values])
    parts = addresses(values_at, values)
    run_arm(elf, [scaled, parts, parts.copy(), addresses(got_at, got), got, values])
    assert got.any()
    np.testing.assert_array_equal(got, want)
