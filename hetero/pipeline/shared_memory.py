"""Memory that this process shares with a child that it starts."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from multiprocessing import reduction
from typing import Any

import numpy as np

from hetero.pipeline.pipe import Segment

NAMELESS = hasattr(os, "memfd_create")


class SharedRegion:
    """`nbytes` bytes. As an argument of a child process it is the same memory there.

    Raises OSError when it cannot be had. A page takes memory when it is first touched. On Linux the region is
    a file without a name, since whatever lies in /dev/shm has to fit there, which in many a container is
    64 MiB; a process that writes more is killed. Elsewhere it has a name until `unlink`.
    """

    def __init__(self, nbytes: int, source: Any = None):
        """`source`: what pickling made of a region of another process."""
        self._fd: int | None = None
        self._segment: Segment | None = None
        if NAMELESS if source is None else not isinstance(source, str):
            self._fd = os.memfd_create("hetero", os.MFD_CLOEXEC) if source is None else source.detach()
            try:
                if source is None:
                    os.ftruncate(self._fd, nbytes)
                self._bytes = np.frombuffer(mmap.mmap(self._fd, nbytes), np.uint8)
            except (OSError, ValueError) as error:
                raise OSError(f"cannot share {nbytes} bytes: {error}") from None
            finally:
                if source is not None:
                    self.unlink()
        else:
            name = source or f"hetero_{os.getpid()}_{secrets.token_hex(4)}"
            self._segment = Segment(name, create=source is None, size=nbytes)
            assert self._segment.buf is not None
            self._bytes = np.frombuffer(self._segment.buf, np.uint8, nbytes)
        self._owned = source is None

    def __reduce__(self) -> tuple[type[SharedRegion], tuple[int, Any]]:
        if self._segment is not None:
            return SharedRegion, (self._bytes.nbytes, self._segment.name)
        assert self._fd is not None, "nobody can get it any more"
        return SharedRegion, (self._bytes.nbytes, reduction.DupFd(self._fd))

    def __call__(self, offset: int, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] of it. See backends.host_memory.Allocate."""
        return self._bytes[offset : offset + nbytes]

    def close(self) -> None:
        """Let go of the memory here: arrays of it keep it. Idempotent."""
        self.unlink()
        self._bytes = self._bytes[:0].copy()
        if self._segment is not None:
            with contextlib.suppress(BufferError):
                self._segment.close()

    def unlink(self) -> None:
        """Once the child has it, or has ended: the memory then goes with its last user. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        if self._segment is not None and self._owned:
            with contextlib.suppress(FileNotFoundError):
                self._segment.unlink()


__all__ = ["SharedRegion"]
