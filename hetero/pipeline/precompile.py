"""Compiling kernels on a first start: in two child processes, while this one reads the model's files.

numba holds the GIL while it compiles, so threads would take turns; and what a compiler has allocated stays
with its process, more than 100 MB of it. The children leave the code in the folder of backends.cpu.jit, from
where this process loads it. What a child does not get done, whatever the reason, is compiled here on use.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from hetero.processes import without_interrupts
from hetero.screen import ProgressCallback

COMPILING = "compiling kernels for this CPU (first start only)"
POLL_SECONDS = 0.2


class Precompiler:
    """Children that compile what no mark in `folder` tells to be compiled. Leaving a `with` closes it."""

    def __init__(self, folder: Path, type_ids: Iterable[int], n_vocab: int, cores: int):
        """`type_ids`: of the matrices that go through our matmul. No child where only one core is usable."""
        types = sorted(set(type_ids))
        work = {"sampler": [n_vocab], "-".join(["kernels", *map(str, types)]): types}
        missing = {mark: numbers for mark, numbers in work.items() if not (folder / mark).exists()}
        if cores < 2 or multiprocessing.current_process().daemon:  # a daemon may have no children
            missing = {}
        context = multiprocessing.get_context("spawn")
        self._children = [
            context.Process(target=compile_kernels, args=(folder, mark, numbers), daemon=True)
            for mark, numbers in missing.items()
        ]
        with without_interrupts():
            for child in self._children:
                child.start()

    def wait(self, progress: ProgressCallback, done: float, meanwhile: Iterator[object]) -> None:
        """Until all children have ended; shows COMPILING, and the part `done` of the whole start.

        `meanwhile` is taken from as long as that lasts: work in pieces that nobody needs.
        """
        nothing = object()
        while alive := [child for child in self._children if child.is_alive()]:
            progress(COMPILING, done)
            if next(meanwhile, nothing) is nothing:
                alive[0].join(POLL_SECONDS)

    def __enter__(self) -> Precompiler:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the children that are still at work."""
        for child in self._children:
            child.kill()
            child.join()


def compile_kernels(folder: Path, mark: str, numbers: list[int]) -> None:
    """In a child: compile one group of kernels, and mark that in `folder`."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    from backends.cpu import jit

    if folder != jit.CACHE_FOLDER:
        return
    if mark == "sampler":
        from hetero.sampling.sampler import Sampler

        Sampler(*numbers).warmup()
    else:
        from backends.cpu import embedding, layers, matmul  # noqa: F401  operators compile when imported

        for type_id in numbers:
            matmul.compiled_matmul(type_id)
            embedding.compiled_lookup(type_id)
            matmul.pack(type_id, 0, 0, matmul.FORMATS[type_id].elements, 0)
    (folder / mark).touch()
