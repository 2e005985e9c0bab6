"""Model parts that servers have sent, each under the SHA-256 of its bytes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from types import TracebackType

from hetero.sizes import format_size

STALE_SECONDS = 3600.0  # a transfer that nobody has written to for so long will not go on
_NAME = re.compile(r"[0-9a-f]{64}")


class CacheError(Exception):
    """A part cannot be kept, or is not what was announced: one line."""


class PartCache:
    """A folder of at most `limit` bytes; those longest out of use make room.

    Several processes may use it at once: files come into being by renaming only.
    """

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit
        self.folder.mkdir(parents=True, exist_ok=True)

    def find(self, sha256: str, size: int) -> Path | None:
        """The part of that name, if it is here as a whole; it then counts as just used."""
        path = self._path(sha256)
        try:
            if path.stat().st_size != size:
                return None
            os.utime(path)
        except OSError:
            return None
        return path

    def receive(self, sha256: str, size: int) -> Incoming:
        """Room for a part that is about to come. Raises CacheError when there is none."""
        if size > self.limit:
            raise CacheError(
                f"the layers need {format_size(size)}, the worker keeps at most {format_size(self.limit)} "
                "(--cache-size)"
            )
        self._make_room(size)
        try:
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise CacheError(f"{self.folder}: {error.strerror}") from None
        if free < size:
            raise CacheError(
                f"the layers need {format_size(size)}, {self.folder} has {format_size(free)} of disk left"
            )
        return Incoming(self._path(sha256), sha256, size)

    def _path(self, sha256: str) -> Path:
        if not _NAME.fullmatch(sha256):
            raise CacheError("a part is named by a SHA-256 in hexadecimal")
        return self.folder / f"{sha256}.gguf"

    def _files(self) -> list[tuple[float, int, Path]]:
        """(time of last use, bytes, path) of everything here, oldest first."""
        found = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # gone meanwhile
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        return sorted(found)

    def _make_room(self, size: int) -> None:
        files = self._files()
        total = sum(nbytes for _, nbytes, _ in files) + size
        for used, nbytes, path in files:
            stale = path.suffix != ".gguf" and time.time() - used > STALE_SECONDS
            if stale or (path.suffix == ".gguf" and total > self.limit):
                with contextlib.suppress(OSError):  # in use, where the system minds that
                    path.unlink()
                    total -= nbytes

    def check_invariants(self) -> None:
        """Whole parts carry the name of their contents and stay within the limit."""
        whole = [path for path in self.folder.iterdir() if path.suffix == ".gguf"]
        assert sum(path.stat().st_size for path in whole) <= self.limit
        for path in whole:
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem


class Incoming:
    """A part on its way into the cache. As a context manager it leaves nothing half done behind."""

    def __init__(self, path: Path, sha256: str, size: int):
        self._path, self._sha256, self._left = path, sha256, size
        self._part = path.with_name(f"{sha256}.{secrets.token_hex(8)}.part")
        self._digest = hashlib.sha256()
        try:
            self._file = self._part.open("wb")
        except OSError as error:
            raise CacheError(f"{self._part}: {error.strerror}") from None

    def write(self, data: bytes) -> None:
        """The next bytes. Raises CacheError when there are too many, or the disk is full."""
        self._left -= len(data)
        if self._left < 0:
            raise CacheError("more bytes than were announced")
        self._digest.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            raise CacheError(f"{self._part}: {error.strerror}") from None

    @property
    def complete(self) -> bool:
        return self._left == 0

    def finish(self) -> Path:
        """Put the part in its place. Raises CacheError unless it is what its name says."""
        if self._left or self._digest.hexdigest() != self._sha256:
            raise CacheError("what arrived is not what was announced")
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.replace(self._path)
        except OSError as error:
            raise CacheError(f"{self._path}: {error.strerror}") from None
        return self._path

    def __enter__(self) -> Incoming:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)
