"""Who waits and who runs, in one order: by priority, and of one priority by arrival.

    order      a b c d e f g h        a: the most important, of those the first to come
    running    a . c d . . . .        waiting: b e f g h

With one priority for all, those that run are a beginning of the order. With several, somebody more important
may come later than those that run. So that nobody waits for ever, one at a time of those that wait is raised
before all others, when it has waited for PATIENCE steps: the first to have come.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter

from hetero.request import Request, RequestStatus

PATIENCE = 256  # steps
LOOK_EVERY = 16  # steps, from one look for who has waited for too long to the next
RAISED = -(1 << 30)  # the level of who was raised: before any priority


class Queues:
    """The scheduler's running and waiting requests, each list in the order above."""

    def __init__(self) -> None:
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.only_one_priority = True  # so far
        self._keys: dict[str, tuple[int, int]] = {}  # (level, number of the arrival)
        self._since: dict[str, int] = {}  # the step in which it began to wait
        self._priorities: Counter[int] = Counter()  # of those that are here
        self._arrivals = 0
        self._raised: str | None = None

    @property
    def mixed(self) -> bool:
        """Whether requests of several priorities are here."""
        return len(self._priorities) > 1

    def add(self, request: Request, step_id: int) -> None:
        """A new request comes to wait."""
        self._keys[request.request_id] = (request.priority, self._arrivals)
        self._arrivals += 1
        self._priorities[request.priority] += 1
        self.only_one_priority = self.only_one_priority and not self.mixed
        self._wait(request, step_id)

    def admit(self) -> Request:
        """The first that waits runs."""
        request = self.waiting.pop(0)
        insort(self.running, request, key=self._key)
        return request

    def put_back(self, request: Request, step_id: int) -> None:
        """One that runs waits again."""
        self.running.remove(request)
        self._wait(request, step_id)

    def remove(self, request: Request) -> None:
        """Take it out of its list."""
        some = self.running if request.status is RequestStatus.RUNNING else self.waiting
        some.remove(request)

    def forget(self, request: Request) -> None:
        """A request has ended, whether or not it still stands in a list. It may never have been here."""
        if self._keys.pop(request.request_id, None) is None:
            return
        del self._since[request.request_id]
        self._priorities[request.priority] -= 1
        if not self._priorities[request.priority]:
            del self._priorities[request.priority]
        if self._raised == request.request_id:
            self._raised = None

    def raise_one(self, step_id: int) -> None:
        """Put the first to have come of those that wait before all others, if it has waited for too long."""
        if not self.mixed or self._raised is not None or not self.waiting or step_id % LOOK_EVERY:
            return
        oldest = min(self.waiting, key=lambda r: self._keys[r.request_id][1])
        if step_id - self._since[oldest.request_id] >= PATIENCE:
            self._raised = oldest.request_id
            self.waiting.remove(oldest)
            self._keys[oldest.request_id] = (RAISED, self._keys[oldest.request_id][1])
            self.waiting.insert(0, oldest)

    def level(self, request: Request) -> int:
        """Its priority, or RAISED."""
        return self._keys[request.request_id][0]

    def rivals(self, request: Request) -> list[Request]:
        """Those that run and do not have to give way to it."""
        if not self.mixed:
            return self.running
        return [r for r in self.running if self.level(r) <= self.level(request)]

    def soon(self, most: int) -> list[Request]:
        """Those that run, and the first that wait, up to `most` in all."""
        return self.running + self.waiting[: most - len(self.running)]

    def head_is(self, embeds: bool) -> bool:
        """Whether a request waits, and the first is one for embeddings, or is none."""
        return bool(self.waiting) and self.waiting[0].embeds == embeds

    def lesser(self) -> Request | None:
        """Of those that run and can stop now, the last that is less important than the first that waits."""
        if not self.mixed or not self.waiting:
            return None
        for other in reversed(self.running):
            if (
                other.priority > self.waiting[0].priority
                and self.level(other) != RAISED
                and not other.in_flight
            ):
                return other
        return None

    def is_behind(self, request: Request) -> bool:
        """Whether more important requests run, be it that this one was raised before them."""
        if not self.mixed:
            return False
        first = (r for r in self.running[:2] if self.level(r) != RAISED)  # at most one was raised
        return any(r.priority < request.priority for r in first)

    def clear(self) -> list[Request]:
        """All that run or wait; they stay known until they are forgotten."""
        everybody = [*self.running, *self.waiting]
        self.running, self.waiting = [], []
        return everybody

    def _wait(self, request: Request, step_id: int) -> None:
        self._since[request.request_id] = step_id
        insort(self.waiting, request, key=self._key)

    def _key(self, request: Request) -> tuple[int, int]:
        return self._keys[request.request_id]

    def check_invariants(self) -> None:
        """Raise AssertionError unless both lists are in order and all counts add up. O(everything)."""
        for some in (self.running, self.waiting):
            keys = [self._keys[r.request_id] for r in some]
            assert keys == sorted(keys) and len(set(keys)) == len(keys), "out of order"
        everybody = [*self.running, *self.waiting]
        assert len(set(map(id, everybody))) == len(everybody) == len(self._keys) == len(self._since)
        assert Counter(r.priority for r in everybody) == self._priorities
        raised = [r.request_id for r in everybody if self._keys[r.request_id][0] == RAISED]
        assert raised == ([] if self._raised is None else [self._raised])
        if self.only_one_priority:
            keys = [self._keys[r.request_id] for r in everybody]
            assert keys == sorted(keys), "not in the order of arrival"


__all__ = ["PATIENCE", "RAISED", "Queues"]
