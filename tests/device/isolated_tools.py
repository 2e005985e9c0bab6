"""Stages in child processes, and what the tests ask about them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from backends.base import DeviceSpec
from backends.ggml.models.config import read_config
from backends.ggml.stage import StageSpec
from hetero.pipeline.isolated import IsolatedStage
from quant.gguf import open_gguf

NUM_BLOCKS, MAX_TOKENS = 200, 64
ONE_THREAD = DeviceSpec("CPU", threads=1)
posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot stop a process")


def spec_of(path: Path, first: int = 0, last: int | None = None, depth: int = 1) -> StageSpec:
    n_layer = read_config(open_gguf(path)).n_layer
    group_of = dict.fromkeys(range(n_layer), 0)
    return StageSpec(first, last or n_layer, group_of, (NUM_BLOCKS,), MAX_TOKENS, MAX_TOKENS, depth)


def isolate(path: Path, spec: StageSpec, device: DeviceSpec = ONE_THREAD, **options) -> IsolatedStage:
    return IsolatedStage(path, read_config(open_gguf(path)), device, spec, **options)


def segments(pid: int | None = None) -> set[str]:
    """Names of shared memory that a process, or this one, has made, where the system shows them."""
    folder = Path("/dev/shm")
    return {p.name for p in folder.glob(f"hetero_{pid or os.getpid()}_*")} if folder.exists() else set()


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def gone(pid: int | None) -> bool:
    """Whether the process has ended, be it that nobody has asked for its exit code yet."""
    assert pid is not None
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
