"""Command-line clients, each in a folder of its own, against servers that record what they ask."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server.real import ROOT, real_server

from .recorder import Recorder, recording

INSTALLED = ROOT / ".venv-clients"
SECONDS = 300

Run = Callable[..., str]


@pytest.fixture(scope="session")
def smollm2_base(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a real model."""
    flags = ("--ctx", "8192", "--kv-tokens", "16384", "--model-name", "smollm2")
    with real_server(tmp_path_factory.mktemp("smollm2"), smollm2_path, *flags) as server:
        yield server.base


@pytest.fixture
def real(smollm2_base: str) -> Iterator[Recorder]:
    with recording(smollm2_base) as recorder:
        yield recorder


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run(program, *arguments, **environment): what an installed client prints; it must succeed."""

    def run(program: str, *arguments: str, **environment: str) -> str:
        path = INSTALLED / program
        assert path.exists(), "`make test-clients` installs the clients"
        # Nothing of the user's: neither settings nor keys of other services.
        home = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TERM": "dumb", "NO_COLOR": "1"}
        done = subprocess.run(
            [str(path), *arguments],
            cwd=tmp_path,
            env={**home, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
