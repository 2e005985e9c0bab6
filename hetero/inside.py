"""What the running program has inside when it is one executable: see build/ and `hetero package`."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path

from quant.one_file import Contents, contents_of


def is_executable() -> bool:
    """Whether this program is the executable rather than a Python package."""
    return bool(getattr(sys, "frozen", False))


def own_file() -> Path:
    """The file that the user started; its parts may run from where it was unpacked."""
    return Path(os.environ.get("HETERO_EXECUTABLE") or sys.executable)


@functools.cache
def contents() -> Contents | None:
    """Settings and model inside the executable; None for a Python package."""
    if not is_executable():
        return None
    try:
        return contents_of(own_file())
    except OSError:  # it was deleted or moved since it started
        return None


def commit() -> str | None:
    """The commit that the executable was built from; None for a Python package."""
    if not is_executable():
        return None
    return str(json.loads(Path(__file__).with_name("build.json").read_text(encoding="utf-8"))["commit"])


def licenses() -> dict[str, str]:
    """Licence texts by the name of what they are of; of an executable alone."""
    folder = Path(__file__).parents[1] / "licenses"
    files = sorted(folder.iterdir()) if is_executable() else []
    return {path.name: path.read_text(encoding="utf-8", errors="replace") for path in files}
