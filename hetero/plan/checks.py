"""What `hetero doctor` looks at: one fact per line, and whether it is as it should be."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hetero import inside
from hetero.model_folder import list_names, models_folder
from hetero.models import resolve
from hetero.plan import devices, kernels
from hetero.sizes import format_size

PACKAGES = ("llama-cpp-python", "numba", "numpy", "llguidance", "aiohttp")


@dataclass(frozen=True, slots=True)
class Check:
    """`ok` False means that serving will fail; `detail` and `facts` say what was found."""

    name: str
    ok: bool
    detail: str
    facts: dict[str, object] = field(default_factory=dict)


Finding = str | tuple[str, dict[str, object]]  # the detail, and perhaps the facts


def run_checks(measure_kernels: bool = False) -> Iterator[Check]:
    """All checks, in the order in which a start needs them. A check that raises has failed.

    With `measure_kernels` also the speed of our matmuls, which takes some seconds.
    """
    for name, check in CHECKS:
        yield _run(name, check)
    if measure_kernels:
        yield from _measured()


def _run(name: str, check: Callable[[], Finding]) -> Check:
    try:
        found = check()
        return Check(name, True, found) if isinstance(found, str) else Check(name, True, *found)
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

    if CACHE_FOLDER.parent.name != "jit":  # one that lasts as long as the process
        return "compiled at every start: the cache folder cannot be written; HETERO_CACHE_DIR names another"
    count = sum(1 for _ in CACHE_FOLDER.rglob("*.nbc"))
    state = f"{count} compiled kernels" if count else "empty; the first start compiles for a while"
    return f"{state}: {CACHE_FOLDER}"


def _matmul() -> Finding:
    chosen = kernels.chosen_kernels()
    names = {who: [name for name, whose in chosen.items() if whose == who] for who in ("ours", "ggml")}
    return "; ".join(f"{who}: {', '.join(n) or 'none'}" for who, n in names.items()), dict(chosen)


def _measured() -> Iterator[Check]:
    """A line for the machine, then one for each format."""
    try:
        machine = kernels.measure_machine()
        limits = f"dot products {machine.dot_gop_s:.0f} GOP/s, reading memory {machine.read_gb_s:.1f} GB/s"
        yield Check("limits", True, f"{machine.threads} threads: {limits}", dataclasses.asdict(machine))
        for speed in kernels.measure_kernels():
            few = f"1 token {speed.few_gop_s:.0f} GOP/s, {speed.few_gb_s / machine.read_gb_s:.0%} of memory's"
            many = (
                f"64 tokens {speed.many_gop_s:.0f} GOP/s, {speed.many_gop_s / machine.dot_gop_s:.0%} of dots'"
            )
            yield Check(f"matmul {speed.format}", True, f"{few}; {many}", dataclasses.asdict(speed))
    except Exception as exc:  # as in _run
        yield Check("limits", False, str(exc) or type(exc).__name__)


def _model() -> str:
    contents = inside.contents()
    if contents is not None and contents.model is None:
        return "none inside this executable: name one"
    return str(resolve(None).path)


def _folder() -> str:
    folder = models_folder()
    return f"{folder}: {', '.join(list_names(folder)) or 'no models'}"


CHECKS: tuple[tuple[str, Callable[[], Finding]], ...] = (
    ("python", _python),
    ("packages", _packages),
    ("ggml", _ggml),
    ("devices", _devices),
    ("cpu", _cpu),
    ("kernels", _kernels),
    ("matmul", _matmul),
    ("default model", _model),
    ("model folder", _folder),
)
