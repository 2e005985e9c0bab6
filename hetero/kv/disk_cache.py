"""The disk tier as the scheduler sees it: requests wait for it, steps carry what is written behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hetero.batch import Step
from hetero.kv.disk_fetch import DiskFetch
from hetero.kv.disk_tier import DiskTier, Stored
from hetero.kv.prefix_tree import Node
from hetero.kv.write_behind import WriteBehind
from hetero.request import Request
from hetero.stats import DiskStats

if TYPE_CHECKING:
    from hetero.kv.manager import KVManager


class DiskCache:
    """Blocks on their way between host memory and a disk: a Below, see there."""

    def __init__(self, kv: KVManager, tier: DiskTier):
        self.tier = tier
        self._behind = WriteBehind(kv, tier)
        self._fetch = DiskFetch(kv, tier)

    @property
    def has_work(self) -> bool:
        return self._behind.has_work

    @property
    def has_more(self) -> bool:
        return self._behind.has_more

    @property
    def held(self) -> list[Request]:
        return self._fetch.held

    def hold(self, request: Request) -> bool:
        return self._fetch.hold(request)

    def cancel(self, request_id: str) -> Request | None:
        return self._fetch.cancel(request_id)

    def take_in(self) -> list[Request]:
        results = self.tier.poll()
        self._behind.stored(each for each in results if isinstance(each, Stored))
        self._fetch.done(each for each in results if not isinstance(each, Stored))
        return self._fetch.release()

    def left(self, node: Node) -> None:
        self._behind.offer_path(node)

    def plan(self, idle: bool) -> None:
        self._behind.plan(idle)

    def ended(self, step: Step, good: bool) -> None:
        self._behind.ended(step, good)

    def cleared(self) -> None:
        """What is on the disk was written before that, and is still trusted."""
        self._behind.forget()
        self._fetch.forget()

    def watch(self, callback: Callable[[], None]) -> None:
        self.tier.on_done = callback

    def wait(self, timeout: float) -> None:
        self.tier.wait(timeout)

    def stats(self) -> DiskStats:
        stats = self.tier.stats()
        stats.waiting = self._behind.num_waiting
        return stats

    def close(self) -> None:
        self.tier.close()

    def check_invariants(self) -> None:
        """Raise AssertionError unless slots in use are pinned. O(what is under way)."""
        self.tier.check_invariants()
        self._behind.check_invariants()
        self._fetch.check_invariants()


__all__ = ["DiskCache"]
