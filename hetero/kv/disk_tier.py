"""Blocks of KV on a disk: what the engine's thread asks for, other threads do."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from hetero.kv.disk_entry import Parts, groups_of, mask_of
from hetero.kv.disk_folder import DiskFolder
from hetero.stats import DiskStats

log = logging.getLogger(__name__)

READERS = 2  # threads: reading waits for the disk, and then for the checksum
MAX_STORES = 256  # blocks that wait to be written; more are not taken
SCAN_SECONDS = 2.0  # for which a start waits for the names of what is there; a larger folder follows later
CLOSE_SECONDS = 10.0  # for what still waits to be written when the server stops
WRITER_NICE, READER_NICE = 10, 5  # where threads have priorities: those that compute go first

NO_MEMORY = (LookupError, OSError, MemoryError)  # a slot's memory cannot be had now
PartsOf = Callable[[int, int], Parts]


@dataclass(frozen=True, slots=True)
class Stored:
    """A block that was handed to `store` is on the disk, or not (`ok`); its slots are free to change."""

    key: bytes
    ok: bool


@dataclass(frozen=True, slots=True)
class Fetched:
    """A job of `fetch` has ended: no slot of it is written to any more.

    `masks[i]` has the KV groups of entry i whose slots hold what was asked for; 0 for a miss.
    """

    job: int
    masks: tuple[int, ...]


@dataclass(slots=True)
class _Store:
    key: bytes
    mask: int
    parts: list[np.ndarray]
    generation: int


@dataclass(slots=True)
class _Job:
    number: int
    masks: list[int]
    left: int
    cancelled: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Stop:
    pass


class DiskTier:
    """Stores host slots as files and fetches them back. The methods are for the engine's thread: no I/O.

    One thread writes, READERS read. Slots that were handed over must not change (`store`) or be looked
    at (`fetch`) until `poll` has said that they are done with. `parts_of(group, slot)` gives a slot's memory,
    uint8 arrays, stage by stage, or raises one of NO_MEMORY.

    Slots are read and written where they lay when it was asked for, whatever becomes of their stage: what was
    good then is stored, and what is fetched for a stage that was lost meanwhile is not in its new memory.
    """

    def __init__(
        self,
        folder: DiskFolder,
        num_groups: int,
        parts_of: PartsOf,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_done` is called, from other threads, when `poll` has something. Starts the threads."""
        self.folder, self.num_groups, self.parts_of, self.on_done = folder, num_groups, parts_of, on_done
        self.num_dropped = 0  # blocks that were not taken
        self._done: deque[Stored | Fetched] = deque()
        self._finished = threading.Event()  # something is in _done
        self._stores: queue.SimpleQueue[_Store | Sequence[bytes] | _Stop] = queue.SimpleQueue()
        self._storing: set[bytes] = set()
        self._generation = 0
        self._jobs: dict[int, _Job] = {}
        self._numbers = itertools.count(1)
        self._scanned = threading.Event()
        self._readers = ThreadPoolExecutor(READERS, "disk-reader", _be_nice, (READER_NICE,))
        self._writer = threading.Thread(target=self._write, name="disk-writer", daemon=True)
        self._writer.start()
        self._scanned.wait(SCAN_SECONDS)

    # -- for the engine's thread ---------------------------------------------------------------------

    def stats(self) -> DiskStats:
        """A snapshot; for any thread."""
        folder = self.folder
        now = {"entries": folder.num_entries, "bytes": folder.used_bytes, "dropped": self.num_dropped}
        return replace(folder.stats, **now)

    @property
    def num_pending(self) -> int:
        """Stores and jobs that `poll` has not reported."""
        return len(self._storing) + len(self._jobs)

    def mask(self, key: bytes) -> int:
        """The KV groups that can be fetched; 0 for none."""
        mask = self.folder.mask(key)
        return mask if mask < 1 << self.num_groups else 0  # else somebody gave the file another name

    def wants(self, key: bytes, mask: int) -> bool:
        """Whether it is worth while to `store` these groups of a block now."""
        return (
            key not in self._storing
            and len(self._storing) < MAX_STORES
            and not self.folder.is_paused
            and self.mask(key) & mask != mask
        )

    def store(self, key: bytes, slots: Mapping[int, int]) -> bool:
        """Write the block with this key behind: `slots` has its slot in each group. False: not taken."""
        mask = mask_of(slots)
        if not mask or not self.wants(key, mask):
            self.num_dropped += 1
            return False
        try:
            parts = [part for g in groups_of(mask) for part in self.parts_of(g, slots[g])]
        except NO_MEMORY:
            self.num_dropped += 1
            return False
        self._storing.add(key)
        self._stores.put(_Store(key, mask, parts, self._generation))
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """Blocks with these keys were used, wherever they were found."""
        if keys:
            self._stores.put(keys)

    def fetch(self, entries: Sequence[tuple[bytes, Mapping[int, int]]]) -> int:
        """Read blocks, each into its slot of each group; groups that the disk does not have are not read.

        Returns the number of the job, which `poll` will report.
        """
        job = _Job(next(self._numbers), [0] * len(entries), len(entries))
        self._jobs[job.number] = job
        if not entries:
            self._report(Fetched(job.number, ()))
        for i, (key, slots) in enumerate(entries):
            held = self.mask(key)
            asked = held & mask_of(slots)
            parts: list[np.ndarray] = []
            try:
                parts = [part for g in groups_of(held) for part in self._target(g, slots.get(g))]
            except NO_MEMORY:
                asked = 0
            self._readers.submit(self._read, job, i, key, held, asked, parts)
        return job.number

    def _target(self, g: int, slot: int | None) -> Parts:
        if slot is not None:
            return self.parts_of(g, slot)
        return [np.empty(part.nbytes, np.uint8) for part in self.parts_of(g, 0)]  # only to be checked

    def cancel(self, job: int) -> None:
        """What of a job has not begun is a miss. It is reported all the same, when it is done with."""
        self._jobs[job].cancelled = True

    def forget_stores(self) -> None:
        """What waits to be written is not: the content may be bad. It is reported as ever."""
        self._generation += 1

    def poll(self) -> list[Stored | Fetched]:
        """What has ended since the last call."""
        self._finished.clear()
        done = []
        while self._done:
            each = self._done.popleft()
            done.append(each)
            if isinstance(each, Stored):
                self._storing.discard(each.key)
            else:
                del self._jobs[each.job]
        return done

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until `poll` has something; False when it has nothing after `timeout` seconds."""
        return self._finished.wait(timeout)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what waits, for so long; then nothing is read or written any more. Idempotent."""
        for job in list(self._jobs.values()):
            job.cancelled = True
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._stores.put(_Stop())
        self._writer.join(seconds)
        if self._writer.is_alive():
            self._generation += 1
            self._writer.join(CLOSE_SECONDS)
        self.folder.close()

    # -- for the others ------------------------------------------------------------------------------

    def _report(self, each: Stored | Fetched) -> None:
        self._done.append(each)
        self._finished.set()
        self.on_done()

    def _write(self) -> None:
        _be_nice(WRITER_NICE)
        try:
            self.folder.scan()
        except Exception:
            log.exception("the disk cache cannot be read")
        self._scanned.set()
        while True:
            item = self._stores.get()
            if isinstance(item, _Stop):
                return
            if isinstance(item, _Store):
                self._report(Stored(item.key, self._put(item)))
            else:
                for key in item:
                    self.folder.touch(key)

    def _put(self, item: _Store) -> bool:
        def wanted() -> bool:
            return item.generation == self._generation

        try:
            return wanted() and self.folder.put(item.key, item.mask, item.parts, wanted)
        except Exception:  # no reason to end the thread, and the slots must be given back
            log.exception("the disk cache could not keep a block")
            return False

    def _read(self, job: _Job, i: int, key: bytes, held: int, asked: int, parts: Parts) -> None:
        good = False
        try:
            good = asked != 0 and not job.cancelled and self.folder.get(key, held, parts)
        except Exception:  # no reason never to report the job
            log.exception("the disk cache could not read a block")
        with job.lock:
            job.masks[i] = asked if good else 0
            job.left -= 1
            last = job.left == 0
        if last:
            self._report(Fetched(job.number, tuple(job.masks)))

    def check_invariants(self) -> None:
        """Raise AssertionError unless the queues are within their bounds."""
        self.folder.check_invariants()
        assert len(self._storing) <= MAX_STORES
        assert all(0 <= job.left <= len(job.masks) for job in self._jobs.values())


def _be_nice(level: int) -> None:
    """Let threads that compute go first. Linux has priorities for threads; elsewhere it is the process's."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), level)


__all__ = ["DiskTier", "Fetched", "Stored"]
