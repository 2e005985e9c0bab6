"""The disk tier's folder: which entries are there, which go when it is full."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from hetero.kv.disk_entry import HEADER_BYTES, BadEntry, Parts, read_entry, write_entry
from hetero.kv.prefix_tree import KEY_BYTES
from hetero.sizes import format_size
from hetero.stats import DiskStats

log = logging.getLogger(__name__)

PAUSE_SECONDS = 60.0  # without writing after the disk was full
WARN_SECONDS = 60.0  # between two warnings of the same kind
TOUCH_SECONDS = 60.0  # a file's time of last use is right to so many
PART_SECONDS = 3600.0  # nothing takes so long to write
DISK_BLOCK = 4096  # a file takes whole ones
SHARE_BETWEEN_LOOKS = 1 / 64  # of the limit: written before looking again what other servers have written
SHARED_MARGIN = 1 / 16  # of the limit: left free while others write

_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{1,8})")
_PART = re.compile(r"(\d{1,9})\.[0-9a-f]{32}")
_SERVER = re.compile(r"[0-9a-f]{32}")

_Id = tuple[str, bytes]  # fingerprint as hex, key


@dataclass(slots=True)
class _Known:
    mask: int
    size: int  # on the disk
    used: float  # mtime of the file: when it was last used, roughly


@dataclass(slots=True)
class _Warnings:
    """At most one line per WARN_SECONDS, with the number of those that were held back."""

    clock: Callable[[], float]
    last: float = float("-inf")
    held_back: int = 0

    def say(self, text: str) -> None:
        if self.clock() - self.last < WARN_SECONDS:
            self.held_back += 1
            return
        more = f" ({self.held_back} more like this)" if self.held_back else ""
        log.warning("%s%s", text, more)
        self.last, self.held_back = self.clock(), 0


class DiskFolder:
    """Entries of any number of models, together within `limit` bytes; the longest unused go first.

        DIR/<fingerprint>/<first 2 digits of the key>/<key>.<groups>     all as hex digits
        DIR/parts/<process id>.<random>                                   being written
        DIR/servers/<random>                                              touched by a server that writes

    A file is written in `parts`, then renamed, so that under an entry's name there is never half of one,
    and a process may end at any moment. Whatever else happened to a file, its checksum shows: then it
    is removed, and was never there. Files with other names are neither touched nor counted.

    Several servers may share a folder. Whichever writes removes what is too much, also of others: a file
    that is gone is a miss. While others write, each looks again from time to time at what there is,
    and leaves a margin, so that all together keep within the limit.

    Thread-safe: `mask` and `used_bytes` never wait for the disk, the rest does. `scan` and `put` are
    for one thread, `get` and `touch` for any.
    """

    def __init__(
        self, folder: Path, limit: int, fingerprint: bytes, clock: Callable[[], float] = time.time
    ) -> None:
        """Makes the folder. OSError when that is not possible."""
        self.folder, self.limit, self.fingerprint = folder, limit, fingerprint
        self.stats = DiskStats()
        self._own = fingerprint.hex()
        self._clock = clock
        self._index: OrderedDict[_Id, _Known] = OrderedDict()  # longest unused first
        self._used = 0
        self._lock = threading.Lock()  # of _index and _used; never held during I/O
        self._paused_until = float("-inf")
        self._unlooked = 0  # bytes written since the last scan
        self._looked = float("-inf")
        self._shared = False  # whether others write, too
        self._presence = folder / "servers" / uuid.uuid4().hex
        self._present = float("-inf")
        self._damage, self._trouble = _Warnings(clock), _Warnings(clock)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what it holds can be told from prompts
        for name in ("parts", "servers", self._own):
            (folder / name).mkdir(mode=0o700, exist_ok=True)

    @property
    def used_bytes(self) -> int:
        """Of all entries, in whole blocks of the disk."""
        return self._used

    @property
    def num_entries(self) -> int:
        """Of all models."""
        return len(self._index)

    def mask(self, key: bytes) -> int:
        """The KV groups that an entry of this model holds; 0 when there is none."""
        known = self._index.get((self._own, key))
        return 0 if known is None else known.mask

    @property
    def is_paused(self) -> bool:
        """Whether nothing is written for a while, because the disk is full or fails."""
        return self._clock() < self._paused_until

    # -- entries -------------------------------------------------------------------------------------

    def put(self, key: bytes, mask: int, parts: Parts, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Keep a block. False when it could not be written. One that holds as much stays as it is.

        `wanted` is asked when all of `parts` was read: False when their content cannot be relied on.
        """
        held = self.mask(key)
        if held & mask == mask:
            self.touch(key)
            return True
        size = bytes_on_disk(HEADER_BYTES + sum(part.nbytes for part in parts))
        if self.is_paused or not self._make_room(size):
            return False
        part = self.folder / "parts" / f"{os.getpid()}.{uuid.uuid4().hex}"
        target, now = self._path((self._own, key), mask), self._clock()
        try:
            for path in (part, target):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            written = write_entry(part, self.fingerprint, key, mask, parts)
            if not wanted():
                _remove(part)
                return False
            os.utime(part, (now, now))  # by this clock, as all times of use
            part.replace(target)
        except OSError as exc:
            _remove(part)
            if not (isinstance(exc, FileNotFoundError) and target.parent.is_dir()):
                self._pause(exc)  # else somebody cannot see this process: see _remove_dead_parts
            return False
        with self._lock:
            before = self._forget((self._own, key))
            self._index[self._own, key] = _Known(mask, size, now)
            self._used += size
        if before is not None and before.mask != mask:
            _remove(self._path((self._own, key), before.mask))
        self._unlooked += size
        self.stats.stored += 1
        self.stats.bytes_written += written
        return True

    def get(self, key: bytes, mask: int, parts: Parts) -> bool:
        """Read the entry that `mask(key)` spoke of into `parts`. False: a miss, and `parts` is rubbish."""
        entry = (self._own, key)
        path = self._path(entry, mask)
        try:
            read_entry(path, self.fingerprint, key, mask, parts)
        except BadEntry as exc:
            self.stats.damaged += 1
            self._damage.say(f"the disk cache's file {path} is not used and removed: {exc}")
            _remove(path)
        except FileNotFoundError:  # another server needed the room
            pass
        except OSError as exc:
            self._trouble.say(f"the disk cache cannot read {path}: {exc.strerror or exc}")
        else:
            self.stats.loaded += 1
            self.stats.bytes_read += HEADER_BYTES + sum(part.nbytes for part in parts)
            self.touch(key)
            return True
        with self._lock:
            known = self._index.get(entry)
            if known is not None and known.mask == mask:
                self._forget(entry)
        return False

    def touch(self, key: bytes) -> None:
        """An entry was used, here or in a faster tier: others go first."""
        entry = (self._own, key)
        with self._lock:
            known = self._index.get(entry)
            if known is None:
                return
            self._index.move_to_end(entry)
            now = self._clock()
            if now - known.used < TOUCH_SECONDS:
                return
            known.used = now
        with contextlib.suppress(OSError):
            os.utime(self._path(entry, known.mask), (now, now))

    def close(self) -> None:
        """Say to others that this server writes no more."""
        _remove(self._presence)

    # -- room ----------------------------------------------------------------------------------------

    def _make_room(self, size: int) -> bool:
        """Remove entries until one of `size` bytes fits. False when it never would."""
        self._look_at_others()
        limit = self.limit - (int(self.limit * SHARED_MARGIN) if self._shared else 0)
        if size > limit:
            return False
        self._shrink(limit - size)
        return True

    def _shrink(self, limit: int) -> None:
        while self._used > limit:
            with self._lock:
                entry = next(iter(self._index))
                known = self._forget(entry)
            assert known is not None
            _remove(self._path(entry, known.mask))
            self.stats.evicted += 1

    def _look_at_others(self) -> None:
        """Show that this server writes, and if others do, too, look what they wrote."""
        now = self._clock()
        if now - self._present > TOUCH_SECONDS / 2:
            self._present = now
            with contextlib.suppress(OSError):
                self._presence.touch()
                os.utime(self._presence, (now, now))
        step = int(self.limit * SHARE_BETWEEN_LOOKS)
        if self._unlooked < step and now - self._looked < TOUCH_SECONDS:
            return
        self._unlooked, self._looked = 0, now
        self._shared = self._others_write(now)
        if self._shared:
            self.scan()

    def _others_write(self, now: float) -> bool:
        for item in _listed(self.folder / "servers"):
            if _SERVER.fullmatch(item.name) and item.name != self._presence.name:
                with contextlib.suppress(OSError):
                    age = now - item.stat().st_mtime
                    if age < 2 * TOUCH_SECONDS:
                        return True
                    _remove(Path(item.path))
        return False

    def _pause(self, exc: OSError) -> None:
        self.stats.failed += 1
        self._paused_until = self._clock() + PAUSE_SECONDS
        self._trouble.say(
            f"the disk cache in {self.folder} is not written to for {PAUSE_SECONDS:.0f} seconds: "
            f"{exc.strerror or exc}"
        )

    # -- what is there -------------------------------------------------------------------------------

    def scan(self) -> None:
        """Read the names, sizes and times of all entries, and remove what a dead process was writing."""
        self._remove_dead_parts()
        found: list[tuple[float, _Id, _Known]] = []
        for model in _listed(self.folder):
            if not _FINGERPRINT.fullmatch(model.name) or not model.is_dir(follow_symlinks=False):
                continue
            for shard in _listed(Path(model.path)):
                if _SHARD.fullmatch(shard.name) and shard.is_dir(follow_symlinks=False):
                    found += self._read_shard(model.name, Path(shard.path))
        found.sort(key=lambda each: each[0])
        doubles = []
        with self._lock:
            self._index.clear()
            self._used = 0
            for _, entry, known in found:
                older = self._forget(entry)
                if older is not None:  # a process ended between writing the new and removing the old
                    doubles.append(self._path(entry, older.mask))
                self._index[entry] = known
                self._used += known.size
        for path in doubles:
            _remove(path)
        self._looked, self._unlooked = self._clock(), 0
        if self._used > self.limit:
            log.info(
                "the disk cache in %s holds %s, more than its limit of %s: the longest unused go",
                self.folder,
                format_size(self._used),
                format_size(self.limit),
            )
            self._shrink(self.limit)

    def _read_shard(self, model: str, shard: Path) -> Iterator[tuple[float, _Id, _Known]]:
        for item in _listed(shard):
            name = _ENTRY.fullmatch(item.name)
            if name is None or not name[1].startswith(shard.name):
                continue
            with contextlib.suppress(OSError):
                stat = item.stat(follow_symlinks=False)
                if item.is_file(follow_symlinks=False):
                    known = _Known(int(name[2], 16), bytes_on_disk(stat.st_size), stat.st_mtime)
                    yield stat.st_mtime, (model, bytes.fromhex(name[1])), known

    def _remove_dead_parts(self) -> None:
        # If the process lives on another machine after all, its rename fails and it has lost one entry. In
        # containers the number of one that has died is soon another's: then its age tells.
        for item in _listed(self.folder / "parts"):
            name = _PART.fullmatch(item.name)
            if name is not None:
                with contextlib.suppress(OSError):
                    age = self._clock() - item.stat().st_mtime
                    if age > PART_SECONDS or not psutil.pid_exists(int(name[1])):
                        _remove(Path(item.path))

    def _path(self, entry: _Id, mask: int) -> Path:
        model, key = entry
        digits = key.hex()
        return self.folder / model / digits[:2] / f"{digits}.{mask:x}"

    def _forget(self, entry: _Id) -> _Known | None:
        known = self._index.pop(entry, None)
        if known is not None:
            self._used -= known.size
        return known

    def check_invariants(self) -> None:
        """Raise AssertionError unless the sum is right and within the limit. O(entries)."""
        with self._lock:
            assert self._used == sum(known.size for known in self._index.values())
            assert self._used <= self.limit
            for (model, key), known in self._index.items():
                assert _FINGERPRINT.fullmatch(model) and len(key) == KEY_BYTES
                assert known.size % DISK_BLOCK == 0 and 0 < known.mask < 1 << 32


def bytes_on_disk(nbytes: int) -> int:
    """What a file of so many bytes takes."""
    return -(-nbytes // DISK_BLOCK) * DISK_BLOCK


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as items:
        return list(items)
    return []


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
