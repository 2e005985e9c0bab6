"""What this build consists of."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

from hetero import __version__, inside

ROOT = Path(__file__).resolve().parents[2]


def version_lines() -> list[str]:
    """The commit; ggml's version, the backends in it and the CPUs that it has code for."""
    return [f"hetero {__version__} (commit {_commit()})", _ggml()]


def versions() -> dict[str, str]:
    """Of what computes. Once ggml is loaded."""
    from backends.ggml.lib import ggml

    return {"hetero": __version__, "ggml": ggml().version().decode(), "llama-cpp-python": _source()}


def _source() -> str:
    return importlib.metadata.version("llama-cpp-python")


def _commit() -> str:
    known = inside.commit()
    if known is None and (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
        known = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return known or "unknown"


def _ggml() -> str:
    from backends.ggml.lib import GgmlError, cpu_variants, ggml

    try:
        lib = ggml()
    except GgmlError as exc:
        return f"ggml: {exc}"
    count = lib.backend_reg_count()
    names = sorted(lib.backend_reg_name(lib.backend_reg_get(i)).decode() for i in range(count))
    variants = ", ".join(cpu_variants(lib.folder)) or "this machine's"
    return (
        f"ggml {lib.version().decode()} (llama-cpp-python {_source()}): backends {', '.join(names)}; "
        f"CPU code for {variants}"
    )
