"""The vector emitter, the folder of compiled code and the CPU levels."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from numba import cfunc, njit, types

from backends.cpu import features, jit
from backends.cpu.simd import F32X16, Emitter, Value, call_address, kernel, kernel_family


@kernel(returns=types.float32)
def _sum(x: Emitter, source: Value) -> Value:
    return x.reduce_add(x.load(source))


@kernel(returns=types.float32)
def _largest(x: Emitter, source: Value) -> Value:
    return x.reduce_max(x.load(source))


@kernel
def _scaled_sums(x: Emitter, source: Value, target: Value, count: Value) -> None:
    """target[0:16] += 2 * each of `count` vectors."""

    def body(i: Value, carried: list[Value]) -> list[Value]:
        return [x.fma(x.splat_f32(2.0), x.load(source, x.mul(i, 64), F32X16), carried[0])]

    (total,) = x.loop_maybe(count, [x.load(target)], body)
    x.store(total, target)


@kernel
def _through_half(x: Emitter, source: Value, target: Value) -> None:
    x.store_f16(x.load(source), target)
    x.store(x.load_f16(target), source)


@kernel_family
def _name_it(x: Emitter, kind: int, variant: int, target: Value) -> None:
    x.store(x.splat_f32(float(100 * kind + variant)), target)


@cfunc("void(int64, int64)")
def _sums_of_one(source, target):
    _scaled_sums((source, target, 1))


@njit
def _reductions(source):
    return _sum((source,)), _largest((source,))


@njit
def _sums(source, target, count):
    _scaled_sums((source, target, count))


@njit
def _halve(source, target):
    _through_half((source, target))


@njit
def _names(target):
    _name_it(3, 7, (target,))
    _name_it(3, 8, (target + 64,))
    _name_it(3, 7, (target + 128,))


@njit
def _indirect(function, source, target):
    call_address(function, (source, target))


def test_reductions():
    x = np.random.default_rng(0).standard_normal(16).astype(np.float32)
    total, largest = _reductions(x.ctypes.data)
    assert total == pytest.approx(x.astype(np.float64).sum(), rel=1e-5)
    assert largest == x.max()


@pytest.mark.parametrize("count", [0, 1, 5])
def test_loop_carries_values(count):
    x = np.arange(80, dtype=np.float32)
    y = np.ones(16, np.float32)
    _sums(x.ctypes.data, y.ctypes.data, count)
    np.testing.assert_array_equal(y, 1 + 2 * x.reshape(5, 16)[:count].sum(0))


def test_half_conversion_rounds_like_numpy():
    x = np.array([0, 1, -1.0001, 65504, 70000, 2.0**-24, 2.0**-26, 3.14159] * 2, np.float32)
    with np.errstate(over="ignore"):
        want = x.astype(np.float16)
    halves = np.zeros(16, np.float16)
    _halve(x.ctypes.data, halves.ctypes.data)
    np.testing.assert_array_equal(halves, want)
    np.testing.assert_array_equal(x, want.astype(np.float32))


def test_family_makes_one_function_per_variant():
    y = np.zeros(48, np.float32)
    _names(y.ctypes.data)
    assert y.tolist() == [307] * 16 + [308] * 16 + [307] * 16


def test_call_address():
    x, y = np.ones(16, np.float32), np.zeros(16, np.float32)
    _indirect(_sums_of_one.address, x.ctypes.data, y.ctypes.data)
    assert (y == 2).all()


def test_cache_key_covers_every_source(tmp_path, monkeypatch):
    before = jit.jit_cache_key()
    assert jit.jit_cache_key() == before
    copy = tmp_path / "cpu"
    shutil.copytree(Path(jit.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(jit, "_SOURCES", copy)
    assert jit.jit_cache_key() == before
    with (copy / "matmul" / "codes.py").open("a") as file:
        file.write("# changed\n")
    assert jit.jit_cache_key() != before


_COMPILE_ONE = """
from backends.cpu import jit
from backends.cpu.matmul import compiled_matmul
print(compiled_matmul(8).cache_hits, jit.CACHE_FOLDER)
"""


def _compile_one(cache: Path) -> tuple[int, Path]:
    """(cache hits, folder) of a process that needs the Q8_0 kernels."""
    environment = {**os.environ, "HETERO_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE_ONE], env=environment, capture_output=True, text=True, check=True
    )
    hits, folder = done.stdout.split(maxsplit=1)
    return int(hits), Path(folder.strip())


def test_second_process_loads_what_the_first_compiled(tmp_path):
    hits, folder = _compile_one(tmp_path)
    assert (hits, folder.parent) == (0, tmp_path / "jit")
    assert _compile_one(tmp_path) == (1, folder)


def test_folders_unused_for_a_month_go(tmp_path):
    current, recent, old, foreign = (tmp_path / name for name in ("0" * 16, "1" * 16, "2" * 16, "photos"))
    month_ago = time.time() - jit.UNUSED_SECONDS - 60
    for path in (current, recent, old, foreign):
        path.mkdir()
        if path != recent:
            os.utime(path, (month_ago, month_ago))
    jit._forget_old(current)
    assert set(tmp_path.iterdir()) == {current, recent, foreign}


def test_unusable_cache_folder_breaks_nothing(tmp_path):
    obstacle = tmp_path / "file"
    obstacle.write_text("not a folder")
    hits, folder = _compile_one(obstacle)
    assert hits == 0
    assert not folder.exists()  # it lasted as long as the process


def test_levels(monkeypatch):
    best = features.cpu_level()
    assert best in features.LEVELS
    monkeypatch.setenv("HETERO_CPU_LEVEL", "generic")
    features.cpu_level.cache_clear()
    assert features.cpu_level() == "generic"
    monkeypatch.setenv("HETERO_CPU_LEVEL", "mmx")
    features.cpu_level.cache_clear()
    with pytest.raises(ValueError, match=r"HETERO_CPU_LEVEL=mmx: this CPU has .*generic"):
        features.cpu_level()
    monkeypatch.undo()
    features.cpu_level.cache_clear()
    assert features.cpu_level() == best
