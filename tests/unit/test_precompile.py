"""The sampler's kernel, compiled in a child process."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.cpu import jit
from hetero.pipeline.precompile import COMPILING, MARK, SamplerCompiler


def test_compiled_code_is_marked_and_not_compiled_again():
    (jit.CACHE_FOLDER / MARK).unlink(missing_ok=True)
    shown = []
    with SamplerCompiler(jit.CACHE_FOLDER, 1000, cores=2) as child:
        child.wait(lambda text, done: shown.append((text, done)), 0.25)
    assert (jit.CACHE_FOLDER / MARK).exists() and set(shown) == {(COMPILING, 0.25)}
    with SamplerCompiler(jit.CACHE_FOLDER, 1000, cores=2) as child:
        child.wait(lambda text, done: pytest.fail("waits for a child"), 0.25)


def test_one_core_has_nothing_to_gain(tmp_path: Path):
    with SamplerCompiler(tmp_path, 1000, cores=1) as child:
        child.wait(lambda text, done: pytest.fail("waits for a child"), 0.0)
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_fails_leaves_no_mark():
    (jit.CACHE_FOLDER / MARK).unlink(missing_ok=True)
    with SamplerCompiler(jit.CACHE_FOLDER, -1, cores=2) as child:
        child.wait(lambda text, done: None, 0.0)
    assert not (jit.CACHE_FOLDER / MARK).exists()


def test_a_child_whose_code_lies_elsewhere_leaves_no_mark(tmp_path: Path):
    with SamplerCompiler(tmp_path, 1000, cores=2) as child:
        child.wait(lambda text, done: None, 0.0)
    assert list(tmp_path.iterdir()) == []


def test_closing_ends_the_child(tmp_path: Path):
    with SamplerCompiler(tmp_path, 1000, cores=2) as compiler:
        child = compiler._child
        assert child is not None and child.is_alive()
    assert not child.is_alive() and list(tmp_path.iterdir()) == []
