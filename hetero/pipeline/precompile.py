"""The sampler's kernel, compiled on a first start in a child process while this one does all the rest.

It takes half as long to compile as everything else, and nothing needs it before the model is loaded. numba
holds the GIL while it compiles, so a thread would gain nothing. The child leaves the code in the folder of
backends.cpu.jit, from where this process loads it; should it fail, the code is compiled here on use.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

from hetero.processes import without_interrupts
from hetero.screen import ProgressCallback

COMPILING = "compiling kernels for this CPU (first start only)"
MARK = "sampler"  # a file in the folder of compiled code that holds the sampler's
POLL_SECONDS = 0.2


class SamplerCompiler:
    """A child that compiles, where `folder` has no mark that this was done. Leaving a `with` closes it."""

    def __init__(self, folder: Path, n_vocab: int, cores: int):
        """Where only one core is usable there is no child, nor in a daemon, which may have none."""
        self._child = None
        if cores < 2 or multiprocessing.current_process().daemon or (folder / MARK).exists():
            return
        context = multiprocessing.get_context("spawn")
        self._child = context.Process(target=compile_sampler, args=(folder, n_vocab), daemon=True)
        with without_interrupts():
            self._child.start()

    def wait(self, progress: ProgressCallback, done: float) -> None:
        """Until the child has ended; shows COMPILING, and the part `done` of the whole start."""
        while self._child is not None and self._child.is_alive():
            progress(COMPILING, done)
            self._child.join(POLL_SECONDS)

    def __enter__(self) -> SamplerCompiler:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child if it is still at work."""
        if self._child is not None:
            self._child.kill()
            self._child.join()


def compile_sampler(folder: Path, n_vocab: int) -> None:
    """In the child."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    from backends.cpu import jit
    from hetero.sampling.sampler import Sampler

    if folder == jit.CACHE_FOLDER:
        Sampler(n_vocab).warmup()
        (folder / MARK).touch()
