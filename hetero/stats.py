"""What the engine counts about itself."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetero.kv.host_tier import TierCounters
from hetero.request import FinishReason, Request

# Seconds. Wide enough for one token of a small model as well as for a long prompt on a slow device.
TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0  # of the requests that were admitted
    generated_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens of ended requests that were found, not computed
    tier_tokens: dict[str, int] = field(default_factory=dict)  # of these in a lower tier, by its name
    missed_tokens: int = 0  # prompt tokens of ended requests that were computed
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    def count_found(self, request: Request) -> None:
        """Take in what an ended request has found in the cache."""
        left = request.num_cached_tokens
        self.cached_tokens += left
        for tier, tokens in request.tier_tokens.items():
            tokens = min(tokens, left)  # a block may hold more than a request still needed
            self.tier_tokens[tier] = self.tier_tokens.get(tier, 0) + tokens
            left -= tokens
        computed = min(request.num_computed_tokens, len(request.prompt_token_ids))  # it may have ended early
        self.missed_tokens += max(0, computed - request.num_cached_tokens)

    def tokens_from(self) -> dict[str, int]:
        """Prompt tokens of ended requests by where their keys and values came from."""
        below = sum(self.tier_tokens.values())
        return {
            "device": self.cached_tokens - below,
            "host": 0,
            **self.tier_tokens,
            "computed": self.missed_tokens,
        }


class Histogram:
    """Counts of values up to each of `bounds` (ascending; counts[-1] is for all above), and their sum."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += times * value

    def copy(self) -> Histogram:
        other = Histogram(self.bounds)
        other.counts, other.sum = list(self.counts), self.sum
        return other


def _tokens() -> Histogram:
    return Histogram(TOKEN_BOUNDS)


def _requests() -> Histogram:
    return Histogram(REQUEST_BOUNDS)


@dataclass(slots=True)
class StageTotals:
    """What steps have cost at one stage so far: seconds and bytes. Busy is transfers and computing."""

    queue_seconds: float = 0.0
    busy_seconds: float = 0.0
    transfer_seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    restarts: int = 0  # after it was lost
    counters: dict[str, int] = field(default_factory=dict)  # of StageBackend.counters


DRAFT_BOUNDS = (0, 1, 2, 4, 8, 16, 32)  # tokens


@dataclass(slots=True)
class SpeculationStats:
    """Guessed tokens since the start, by the name of their proposer.

    `accepted[name][i]`: how often guess i of a draft was right. `chosen`: tokens of the drafts that were
    computed, 0 where none was worth it. `request_tokens`: tokens that a request got from one step.
    `draft_seconds`: time that a draft model took.
    """

    drafted: dict[str, int]
    accepted: dict[str, list[int]]
    chosen: Histogram
    request_tokens: Histogram
    draft_seconds: float = 0.0

    @classmethod
    def of(cls, names: Sequence[str], max_tokens: int) -> SpeculationStats:
        """All zero."""
        return cls(
            dict.fromkeys(names, 0),
            {name: [0] * max_tokens for name in names},
            Histogram(DRAFT_BOUNDS),
            Histogram(DRAFT_BOUNDS[1:]),
        )

    def copy(self) -> SpeculationStats:
        accepted = {name: list(counts) for name, counts in self.accepted.items()}
        drafted, chosen, tokens = dict(self.drafted), self.chosen.copy(), self.request_tokens.copy()
        return SpeculationStats(drafted, accepted, chosen, tokens, self.draft_seconds)


@dataclass(slots=True)
class DiskStats:
    """What is on the disk, and totals since the start: of blocks, and of bytes with their headers."""

    entries: int = 0
    bytes: int = 0  # in whole blocks of the disk, of all models in the folder
    waiting: int = 0  # are still to be written
    stored: int = 0
    loaded: int = 0
    evicted: int = 0
    damaged: int = 0
    failed: int = 0  # could not be written
    dropped: int = 0  # were not taken: too many waited
    bytes_written: int = 0
    bytes_read: int = 0


@dataclass(slots=True)
class EngineStats:
    """A snapshot. Counters are totals since the start, times are seconds.

    `kv_blocks` has (usable, available) per KV group, of recurrent layers' group states, `host_slots` (all,
    free). `step_seconds` is the time from step to step while there was work; `host_seconds` is the part of
    it that no device computed.
    """

    running: int = 0
    waiting: int = 0
    kv_blocks: list[tuple[int, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    tokens_from: dict[str, int] = field(default_factory=dict)
    moves: TierCounters = field(default_factory=TierCounters)
    host_slots: list[tuple[int, int]] = field(default_factory=list)
    preemptions: int = 0
    cancelled: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    step_seconds: float = 0.0
    host_seconds: float = 0.0
    stages: list[StageTotals] = field(default_factory=list)
    disk: DiskStats | None = None
    ttft: Histogram = field(default_factory=_requests)
    inter_token: Histogram = field(default_factory=_tokens)
    queue: Histogram = field(default_factory=_requests)
    e2e: Histogram = field(default_factory=_requests)
    speculation: SpeculationStats | None = None
