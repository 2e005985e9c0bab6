"""Kernels that are compiled in child processes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from backends.cpu import jit, matmul
from hetero.pipeline.precompile import COMPILING, Precompiler

Q8_0 = 8
TYPES = [Q8_0] if matmul.supported(Q8_0, 32, 32) else []
MARKS = ["sampler", "kernels-8" if TYPES else "kernels"]


def test_compiled_code_is_marked_and_found_again():
    for mark in MARKS:
        (jit.CACHE_FOLDER / mark).unlink(missing_ok=True)
    shown, pieces = [], itertools.count()
    with Precompiler(jit.CACHE_FOLDER, TYPES, 1000, cores=2) as children:
        children.wait(lambda text, done: shown.append((text, done)), 0.25, (next(pieces) for _ in range(3)))
    assert all((jit.CACHE_FOLDER / mark).exists() for mark in MARKS)
    assert set(shown) == {(COMPILING, 0.25)} and next(pieces) == 3
    again: list[str] = []
    with Precompiler(jit.CACHE_FOLDER, TYPES, 1000, cores=2) as children:
        children.wait(lambda text, done: again.append(text), 0.25, iter(()))
    assert again == []


def test_one_core_has_nothing_to_gain(tmp_path: Path):
    with Precompiler(tmp_path, TYPES, 1000, cores=1) as children:
        children.wait(lambda text, done: pytest.fail("waits for a child"), 0.0, iter(()))
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_fails_leaves_the_work_to_others():
    mark = jit.CACHE_FOLDER / "kernels-9999"
    with Precompiler(jit.CACHE_FOLDER, [9999], 1000, cores=2) as children:
        children.wait(lambda text, done: None, 0.0, iter(()))
    assert not mark.exists()


def test_closing_ends_the_children(tmp_path: Path):
    with Precompiler(tmp_path, TYPES, 1000, cores=2) as children:
        running = list(children._children)
        assert len(running) == 2
    assert not any(child.is_alive() for child in running) and list(tmp_path.iterdir()) == []
