"""A disk tier without a disk or threads: things end at random, as late as they may, and some go wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import numpy as np

from hetero.kv.disk_entry import groups_of, mask_of
from hetero.kv.disk_tier import Fetched, Stored

Files = dict[bytes, dict[int, bytes]]  # content by key and group
QUEUE = 5


class FakeDiskTier:
    """What DiskTier does, seen from the scheduler's thread. `slot(group, number)` is a slot's memory.

    Slots that are stored are read when that is reported, so that whoever changes them before is found out;
    slots that are fetched hold garbage from the start to the end. `filling` gives the groups and slots that
    steps in flight write.
    """

    def __init__(
        self,
        files: Files,
        slot: Callable[[int, int], np.ndarray],
        filling: Callable[[], set[tuple[int, int]]],
        rng: random.Random,
    ):
        self.files, self._slot, self._filling, self._rng = files, slot, filling, rng
        self.folder = SimpleNamespace(is_paused=False)
        self._stores: list[tuple[bytes, dict[int, np.ndarray], int]] = []
        self._jobs: dict[int, list[tuple[bytes, dict[int, np.ndarray]]]] = {}
        self._cancelled: set[int] = set()
        self._number = self._generation = 0
        self.touched: list[bytes] = []

    @property
    def num_pending(self) -> int:
        return len(self._stores) + len(self._jobs)

    def mask(self, key: bytes) -> int:
        return mask_of(self.files.get(key, {}))

    def wants(self, key: bytes, mask: int) -> bool:
        storing = [k for k, _, _ in self._stores]
        return key not in storing and len(storing) < QUEUE and self.mask(key) & mask != mask

    def store(self, key: bytes, slots: Mapping[int, int]) -> bool:
        if not slots or not self.wants(key, mask_of(slots)):
            return False
        assert self._filling().isdisjoint(slots.items()), "a slot is stored that is not filled yet"
        self._stores.append((key, self._memory(slots), self._generation))
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        self.touched += keys

    def fetch(self, entries: Sequence[tuple[bytes, Mapping[int, int]]]) -> int:
        self._number += 1
        self._jobs[self._number] = [(key, self._memory(slots)) for key, slots in entries]
        for _, memory in self._jobs[self._number]:
            for part in memory.values():
                part[:] = -1
        return self._number

    def _memory(self, slots: Mapping[int, int]) -> dict[int, np.ndarray]:
        return {g: self._slot(g, slot) for g, slot in slots.items()}

    def cancel(self, job: int) -> None:
        assert job in self._jobs
        self._cancelled.add(job)

    def forget_stores(self) -> None:
        self._generation += 1

    def poll(self) -> list[Stored | Fetched]:
        done: list[Stored | Fetched] = []
        while self._stores and self._rng.random() < 0.4:
            key, memory, generation = self._stores.pop(0)
            ok = generation == self._generation and self._rng.random() < 0.9
            if ok:
                self.files[key] = {g: part.tobytes() for g, part in memory.items()}
            done.append(Stored(key, ok))
        for job in [j for j in self._jobs if self._rng.random() < 0.3]:
            entries = self._jobs.pop(job)
            done.append(Fetched(job, tuple(self._read(job, key, memory) for key, memory in entries)))
        if self.files and self._rng.random() < 0.05:
            del self.files[self._rng.choice(sorted(self.files))]  # for another one, or damaged
        return done

    def _read(self, job: int, key: bytes, memory: dict[int, np.ndarray]) -> int:
        found = mask_of(memory) & self.mask(key)
        if self._rng.random() < (0.5 if job in self._cancelled else 0.05):
            found = 0
        for part in memory.values():
            if job not in self._cancelled:  # as are those whose slots are distrusted
                assert (part == -1).all(), "a slot is used while it is fetched"
        for g in groups_of(found):
            memory[g][:] = np.frombuffer(self.files[key][g], np.int64)
        return found

    def check_invariants(self) -> None:
        assert len(self._stores) <= QUEUE


__all__ = ["FakeDiskTier", "Files"]
