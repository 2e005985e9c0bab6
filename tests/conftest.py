"""Fixtures for all tests: real models, and a home of their own, so that no user folder is touched."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from places import PERSISTENT, gemma3, smollm2

# Threads that wait for each other by spinning take the cores from another worker's tests. OpenMP reads this
# once, when the first module that needs ggml is imported, which may be a conftest.py beside the tests.
os.environ["OMP_WAIT_POLICY"] = "passive"


def pytest_configure(config: pytest.Config) -> None:
    """Before any import of the package: numba and platformdirs read the environment early."""
    kept = ("HETERO_GGML_LIBS", "HETERO_TEST_SCALE")
    for name in [n for n in os.environ if n.startswith("HETERO_") and n not in kept]:
        del os.environ[name]
    home = Path(tempfile.mkdtemp(prefix="hetero-test-"))
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    folders = {
        "HETERO_CACHE_DIR": PERSISTENT / "cache",
        "HETERO_MODELS": home / "data" / "hetero" / "models",
        "XDG_CACHE_HOME": home / "cache",
        "XDG_CONFIG_HOME": home / "config",
        "XDG_DATA_HOME": home / "data",
        "XDG_STATE_HOME": home / "state",
        "LLM_USER_PATH": home / "llm",
        "NUMBA_CACHE_DIR": PERSISTENT / "numba",
    }
    for name, folder in folders.items():
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[name] = str(folder)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return smollm2()


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    return gemma3()
