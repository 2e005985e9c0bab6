"""Sends a workload's sessions to a server, as fast as they arrive or as fast as it answers.

open loop    sessions arrive at a rate, whether or not the server keeps up: queues grow, as with people
closed loop  N clients, each asks again when it has its answer: the load falls when the server is slow
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import aiohttp

from hetero.bench.client import Record, Target, ask
from hetero.bench.distributions import arrival_times
from hetero.bench.workload import Message, Session

REQUEST_SECONDS = 600.0  # after which an answer counts as failed


@dataclass(frozen=True, slots=True)
class Load:
    """How sessions arrive: `rate` a second with `burstiness` (see arrival_times), or `concurrency` clients.

    One of `rate` and `concurrency` is None; both: the times that the workload recorded. `seconds`: after
    which no session begins any more, and those that run are waited for.
    """

    rate: float | None = None
    burstiness: float = 1.0
    concurrency: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} client{'s' if self.concurrency != 1 else ''}"
        if self.rate is None:
            return "as recorded"
        kind = "" if self.burstiness == 1 else f", burstiness {self.burstiness:g}"
        return f"{self.rate:g} a second{kind}"


@dataclass(frozen=True, slots=True)
class Run:
    """What a load has led to. `seconds`: from the start to the last answer."""

    records: tuple[Record, ...]
    seconds: float


Progress = Callable[[int, int], None]  # requests that have ended, of how many


def run_load(
    target: Target,
    sessions: Sequence[Session],
    load: Load,
    seed: int,
    progress: Progress = lambda done, total: None,
) -> Run:
    """Send all sessions and wait for the answers. Failed requests are in the records, not raised."""
    return asyncio.run(_run(target, sessions, load, seed, progress))


async def _run(target: Target, sessions: Sequence[Session], load: Load, seed: int, progress: Progress) -> Run:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        sender = _Sender(http, target, seed, sum(len(s.turns) for s in sessions), progress)
        if load.concurrency is not None:
            await _closed(sender, sessions, load.concurrency, load.seconds)
        else:
            await _open(sender, sessions, load, seed)
        ends = [record.end for record in sender.records]
        return Run(tuple(sender.records), max(ends, default=0.0))


class _Sender:
    def __init__(
        self, http: aiohttp.ClientSession, target: Target, seed: int, total: int, progress: Progress
    ):
        self.http, self.target, self.seed, self.progress = http, target, seed, progress
        self.records: list[Record] = []
        self.started = time.perf_counter()
        self._total, self._ended = total, 0

    @property
    def now(self) -> float:
        return time.perf_counter() - self.started

    async def hold(self, number: int, session: Session, due: float) -> None:
        """All turns of a session; the first one that fails ends it."""
        said: list[Message] = []
        for index, turn in enumerate(session.turns):
            if turn.pause:
                await asyncio.sleep(turn.pause)
                due = self.now
            elif index:
                due = self.now
            said += turn.messages
            record = Record(number, index, due)
            self.records.append(record)
            try:
                await ask(
                    self.http, self.target, record, said, turn.max_tokens, self.seed + number, self.started
                )
            finally:
                self._ended += 1
                self.progress(self._ended, self._total)
            if record.error is not None:
                self._total -= len(session.turns) - index - 1
                return
            said.append({"role": "assistant", "content": record.text})


async def _closed(
    sender: _Sender, sessions: Sequence[Session], concurrency: int, seconds: float | None
) -> None:
    numbers = count()

    async def client() -> None:
        while (number := next(numbers)) < len(sessions):
            if seconds is not None and sender.now >= seconds:
                return
            await sender.hold(number, sessions[number], sender.now)

    await asyncio.gather(*(client() for _ in range(min(concurrency, len(sessions)))))


async def _open(sender: _Sender, sessions: Sequence[Session], load: Load, seed: int) -> None:
    if load.rate is None:
        times = [session.arrival or 0.0 for session in sessions]
    else:
        rng = random.Random(f"arrivals/{seed}")
        times = arrival_times(rng, load.rate, load.burstiness, len(sessions))
    async with asyncio.TaskGroup() as group:
        for number, (due, session) in enumerate(zip(times, sessions, strict=True)):
            if load.seconds is not None and due >= load.seconds:
                break
            await asyncio.sleep(max(0.0, due - sender.now))
            group.create_task(sender.hold(number, session, due))
