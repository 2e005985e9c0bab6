"""Imports go one way, and the command line stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cli", "hetero", "backends", "quant", "spec")
ARROWS = {
    "cli": {"hetero"},
    "hetero": {"backends", "quant", "spec"},
    "backends": {"quant"},
    "quant": set(),
    "spec": set(),
}
TOUCH_DEVICES = ("hetero.plan", "hetero.pipeline", "hetero.prepare", "hetero.launch")
SERVER_SEES = (
    "hetero.server",
    "hetero.async_engine",
    "hetero.request",
    "hetero.sampling.params",
    "hetero.text.parts",
    "hetero.text.service",
    "hetero.__version__",
)
HEAVY = ("numba", "llama_cpp", "aiohttp", "numpy", "jinja2", "llguidance", "rich")


def imports(source: str, module: str, is_package: bool = False) -> Iterator[tuple[str, bool]]:
    """(absolute dotted name, whether at module level) of each import; `from a import b` gives a.b."""
    tree = ast.parse(source)
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, FUNCTIONS) for n in ast.walk(f)}
    for node in ast.walk(tree):
        top = id(node) not in inside
        if isinstance(node, ast.Import):
            yield from ((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                keep = len(module.split(".")) - node.level + is_package
                base = ".".join([*module.split(".")[:keep], *filter(None, [base])])
            yield from ((f"{base}.{alias.name}", top) for alias in node.names)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def under(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def wrong_arrows(source: str, module: str, is_package: bool = False) -> list[str]:
    """One line for each import that goes the wrong way."""
    package = module.split(".")[0]
    wrong = []
    for name, top in imports(source, module, is_package):
        target = name.split(".")[0]
        ours = target in PACKAGES
        reason = None
        if ours and target != package and target not in ARROWS[package]:
            reason = f"{package} must not import {target}"
        elif package == "hetero" and target == "backends" and not under(module, TOUCH_DEVICES):
            reason = "only hetero.plan, hetero.pipeline, hetero.prepare and hetero.launch touch devices"
        elif under(module, ("hetero.server",)) and ours and not under(name, SERVER_SEES):
            reason = "hetero.server sees only " + ", ".join(SERVER_SEES[1:])
        elif package == "cli" and top and under(name, HEAVY):
            reason = "heavy imports belong inside the commands"
        if reason:
            wrong.append(f"{module} imports {name}: {reason}")
    return wrong


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        files = [ROOT / "cli.py"] if package == "cli" else sorted((ROOT / package).rglob("*.py"))
        for path in files:
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(p for p in parts if p != "__init__"), path


def test_imports_go_one_way():
    found = [
        line
        for name, path in modules()
        for line in wrong_arrows(path.read_text(encoding="utf-8"), name, path.name == "__init__.py")
    ]
    assert found == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("quant.gguf", "import hetero.config"),
        ("spec.ngram", "from quant import gguf"),
        ("backends.ggml.lib", "from hetero.batch import Batch"),
        ("hetero.engine", "def f():\n    import backends.base"),
        ("hetero.engine", "import cli"),
        ("hetero.server.app", "from hetero.text.tokenizer import Tokenizer"),
        ("hetero.server.app", "from hetero.text import tokenizer"),
        ("hetero.server.app", "from ..text import tokenizer"),
        ("hetero.server.app", "import quant.gguf"),
        ("cli", "import numpy as np"),
        ("cli", "from backends.ggml import devices"),
    ],
)
def test_a_wrong_arrow_is_found(module: str, source: str):
    assert len(wrong_arrows(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cli", "def serve():\n    import numpy"),
        ("hetero.plan.devices", "from backends.ggml import devices"),
        ("hetero.launch", "from backends.ggml import models"),
        ("hetero.server.openai", "from hetero.request import Request\nfrom . import sse"),
        ("hetero.text.tokenizer", "from .detokenizer import Detokenizer\nimport quant.gguf"),
        ("backends.cpu.matmul", "from quant.types import GGML_TYPES"),
    ],
)
def test_a_right_arrow_passes(module: str, source: str):
    assert wrong_arrows(source, module) == []


def test_importing_the_command_line_loads_nothing_heavy():
    code = f"import cli, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_test_files_have_names_of_their_own():
    """Outside of packages they are imported by name: of two with one name pytest refuses the second."""
    files = [p for p in (ROOT / "tests").rglob("*.py") if not (p.parent / "__init__.py").exists()]
    names = [p.name for p in files if p.name != "conftest.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []
