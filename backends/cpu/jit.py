"""Where numba keeps compiled code. Import before anything that decorates with `cache=True`.

numba notices when the file of a cached function changes, but not when a file changes whose emitters or
helpers were compiled into it. So the folder is named by a hash of all of this package's sources, the
compiler's versions and the CPU: another build of any of them starts afresh. Folders that nothing used for a
month are removed.

Inside the executable (build/) there are no sources, and numba would tell builds apart by the executable's
date and functions by where it was unpacked to. There the sources' hash is a file made while building,
functions go by the names of their modules, and code is compiled for the CPU's level, not for its model: so
what was compiled while building, which lies in `jit/KEY` beside the modules, serves on other machines too.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import llvmlite
import numba
import platformdirs
from llvmlite import binding
from numba.core import caching, config

from backends.cpu.features import cpu_level

_SOURCES = Path(__file__).parent
SOURCES_DIGEST = "sources.sha256"  # beside this module in an executable
UNUSED_SECONDS = 30 * 24 * 3600
# LLVM's names for the least CPU of a level, and what it has beyond that
TARGETS = {
    "avx512_vnni": ("x86-64-v4", "+avx512vnni,-prefer-256-bit"),
    "avx_vnni": ("x86-64-v3", "+avxvnni"),
    "avx2": ("x86-64-v3", ""),
}


def jit_cache_key() -> str:
    """16 hex digits that name what compiled code depends on."""
    parts = [numba.__version__, llvmlite.__version__, sys.version]
    parts += [str(config.CPU_NAME), str(config.CPU_FEATURES)]
    if _is_frozen():
        return _key([*parts, cpu_level(), (_SOURCES / SOURCES_DIGEST).read_text()])
    parts += [binding.get_host_cpu_name(), os.environ.get("HETERO_CPU_LEVEL", "")]
    return _key([*parts, sources_digest(_SOURCES)])


def sources_digest(*folders: Path) -> str:
    """64 hex digits that name the Python sources below these folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _key(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _is_frozen() -> bool:
    return getattr(sys, "frozen", False)


class ModuleLocator(caching._CacheLocator):
    """Files a function's compiled code under its module's name, wherever that was loaded from."""

    def __init__(self, py_func, py_file: str) -> None:
        self._py_file, self._line = py_file, py_func.__code__.co_firstlineno
        self._folder = Path(config.CACHE_DIR, py_func.__module__)

    @classmethod
    def from_function(cls, py_func, py_file: str) -> ModuleLocator:
        locator = cls(py_func, py_file)
        locator.ensure_cache_path()
        return locator

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return CACHE_FOLDER.name  # the key, which holds the sources' hash

    def get_disambiguator(self) -> str:
        return str(self._line)


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _forget_old(folder: Path) -> None:
    """Mark the folder as used now, and remove other keys' folders that nothing used for UNUSED_SECONDS."""
    now = time.time()
    with contextlib.suppress(OSError):
        os.utime(folder)
        for other in folder.parent.iterdir():
            named_by_a_key = re.fullmatch("[0-9a-f]{16}", other.name)
            if named_by_a_key and now - other.stat().st_mtime > UNUSED_SECONDS:
                shutil.rmtree(other, ignore_errors=True)


def _set_cache_folder() -> Path:
    """Point numba at the keyed folder, or at one that lasts as long as the process if that is read-only."""
    if _is_frozen():
        config.CPU_NAME, config.CPU_FEATURES = TARGETS.get(
            cpu_level(), (config.CPU_NAME, config.CPU_FEATURES)
        )
        config.CACHE_LOCATOR_CLASSES = f"{__name__}.{ModuleLocator.__name__}"
    base = os.environ.get("HETERO_CACHE_DIR") or platformdirs.user_cache_dir("hetero")
    folder = Path(base).expanduser() / "jit" / jit_cache_key()
    shipped = _SOURCES.parent.parent / "jit" / folder.name if _is_frozen() else None
    new = not folder.exists()
    if _writable(folder):
        _forget_old(folder)
    else:
        new, folder = True, Path(tempfile.mkdtemp(prefix="hetero-jit-")) / folder.name
        atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    if new and shipped is not None and shipped.is_dir():
        with contextlib.suppress(OSError):  # a full disk: then it is compiled again
            shutil.copytree(shipped, folder, dirs_exist_ok=True)
    config.CACHE_DIR = str(folder)
    return folder


CACHE_FOLDER = _set_cache_folder()
