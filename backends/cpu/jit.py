"""Where numba keeps compiled code. Import before anything that decorates with `cache=True`.

numba notices when the file of a cached function changes, but not when a file changes whose emitters or
helpers were compiled into it. So the folder is named by a hash of all of this package's sources, the
compiler's versions and the CPU: another build of any of them starts afresh. Folders that nothing used for a
month are removed.
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
from numba.core import config

_SOURCES = Path(__file__).parent
UNUSED_SECONDS = 30 * 24 * 3600


def jit_cache_key() -> str:
    """16 hex digits that name what compiled code depends on."""
    parts = [numba.__version__, llvmlite.__version__, binding.get_host_cpu_name(), sys.version]
    parts += [str(config.CPU_NAME), str(config.CPU_FEATURES), os.environ.get("HETERO_CPU_LEVEL", "")]
    digest = hashlib.sha256("\n".join(parts).encode())
    for path in sorted(_SOURCES.rglob("*.py")):
        digest.update(path.read_bytes())
    if getattr(sys, "frozen", False):  # the sources are inside the executable
        digest.update(str(Path(sys.executable).stat().st_mtime_ns).encode())
    return digest.hexdigest()[:16]


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
    base = os.environ.get("HETERO_CACHE_DIR") or platformdirs.user_cache_dir("hetero")
    folder = Path(base).expanduser() / "jit" / jit_cache_key()
    if _writable(folder):
        _forget_old(folder)
    else:
        folder = Path(tempfile.mkdtemp(prefix="hetero-jit-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config.CACHE_DIR = str(folder)
    return folder


CACHE_FOLDER = _set_cache_folder()
