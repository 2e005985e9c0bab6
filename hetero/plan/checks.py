"""What `hetero doctor` looks at: one fact per line, and whether it is as it should be."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass

from hetero.config import format_size
from hetero.models import default_model, list_names, models_folder
from hetero.plan import devices

PACKAGES = ("llama-cpp-python", "numba", "numpy", "llguidance", "aiohttp")


@dataclass(frozen=True, slots=True)
class Check:
    """`ok` False means that serving will fail; `detail` says what was found."""

    name: str
    ok: bool
    detail: str


def run_checks() -> list[Check]:
    """All checks, in the order in which a start needs them. A check that raises has failed."""
    return [_run(name, check) for name, check in CHECKS]


def _run(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, True, check())
    except Exception as exc:  # whatever is broken, the report goes on
        return Check(name, False, str(exc) or type(exc).__name__)


def _python() -> str:
    return f"{platform.python_version()} ({sys.executable}), {platform.platform()}"


def _packages() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)


def _ggml() -> str:
    from backends.ggml.lib import ggml, library_folder

    source = "HETERO_GGML_LIBS" if os.environ.get("HETERO_GGML_LIBS") else "llama-cpp-python"
    return f"{ggml().version().decode()} from {source}: {library_folder()}"


def _devices() -> str:
    found = devices.list_devices()
    return "; ".join(f"{d.name}: {d.description}, {format_size(d.free_bytes)} free" for d in found)


def _cpu() -> str:
    from backends.cpu.features import cpu_level

    return f"{cpu_level()} kernels, {devices.usable_cores()} compute threads"


def _kernels() -> str:
    from backends.cpu.jit import CACHE_FOLDER

    count = sum(1 for _ in CACHE_FOLDER.rglob("*.nbc"))
    state = f"{count} compiled kernels" if count else "empty; the first start compiles for a while"
    return f"{state}: {CACHE_FOLDER}"


def _model() -> str:
    return str(default_model())


def _folder() -> str:
    folder = models_folder()
    return f"{folder}: {', '.join(list_names(folder)) or 'no models'}"


CHECKS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("python", _python),
    ("packages", _packages),
    ("ggml", _ggml),
    ("devices", _devices),
    ("cpu", _cpu),
    ("kernels", _kernels),
    ("default model", _model),
    ("model folder", _folder),
)
