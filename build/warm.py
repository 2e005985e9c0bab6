"""Compiles kernels while building, so that the first start elsewhere finds them compiled.

The unpacked program runs build/exercise.py's models once for each level of CPU that this one can be. What it
compiled goes to the folder from which the program takes it (backends/cpu/jit.py). A kernel that none of
those runs used fails the build: on another machine somebody would wait for it.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import exercise
import ggml

NOT_USED = {
    ("backends.cpu.matmul.activations", "quantize_activations"),  # the entry for tests
    ("spec.automaton", "_bucket"),  # always part of those that call it
}


def fill(program: Path, work: Path, sources: Sequence[str]) -> None:
    """`program` is PyInstaller's folder; `work` a folder that may be made and is left behind; `sources` the
    folders in which kernels may lie.

    What is compiled is kept in the user's cache folder: a second build takes it from there, unless
    `sources` changed.
    """
    from backends.cpu.features import available_levels
    from backends.cpu.jit import TARGETS

    kernels, started = set(cached_functions(exercise.ROOT)), time.time() - 1
    if strange := sorted(m for m, _ in kernels if not m.replace(".", "/").startswith(tuple(sources))):
        sys.exit(f"{', '.join(strange)}: has kernels, and lies in none of the folders {', '.join(sources)}")
    jit = ggml.cache_folder() / "warm" / "jit"
    for level in available_levels():
        if level not in TARGETS:
            continue
        print(f"compiling kernels for {level}", file=sys.stderr)
        environment = {**os.environ, "HETERO_CACHE_DIR": str(jit.parent), "HETERO_CPU_LEVEL": level}
        environment.pop("PYTHONPATH", None)
        try:
            exercise.exercise([str(program / "hetero")], work, str(work), environment)
        except exercise.Failed as exc:
            sys.exit(str(exc))
    for folder in jit.iterdir():
        if folder.stat().st_mtime >= started:  # each run marks what it uses
            if missing := kernels - compiled(folder) - NOT_USED:
                names = ", ".join(f"{module}.{name}" for module, name in sorted(missing))
                sys.exit(f"no run of build/exercise.py uses {names}: add one")
            shutil.copytree(folder, program / "_internal" / "jit" / folder.name)


def cached_functions(root: Path) -> Iterator[tuple[str, str]]:
    """Module and name of each function below `root` that numba compiles and keeps."""
    for package in ("backends", "hetero", "quant", "spec"):
        for path in sorted((root / package).rglob("*.py")):
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and any(map(_keeps, node.decorator_list)):
                    yield module, node.name


def _keeps(decorator: ast.expr) -> bool:
    """Whether it is a call with cache=True."""
    if not isinstance(decorator, ast.Call):
        return False
    return any(
        k.arg == "cache" and isinstance(k.value, ast.Constant) and k.value.value for k in decorator.keywords
    )


def compiled(folder: Path) -> set[tuple[str, str]]:
    """The same of what numba kept in a folder: MODULE/FILE.OUTER.locals.NAME-LINE.pyVERSION.nbi."""
    return {
        (path.parent.name, path.name.rsplit("-", 1)[0].rsplit(".", 1)[1]) for path in folder.rglob("*.nbi")
    }
