"""How often a sequence lies in one piece: the share of decoded tokens whose blocks follow each other.

    python -m tests.bench.blocks

Scheduler and KV cache without a model. Each user holds conversations of several turns that begin with the
same system prompt, or with one of their own, and waits for the answer before the next turn.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field

import numpy as np

from backends.ggml.attention_layout import span_of
from hetero.kv.groups import KVGroup
from hetero.kv.manager import KVManager
from hetero.request import Request
from hetero.sampling.params import SamplingParams
from hetero.scheduler import Scheduler

BLOCK_SIZE = 16
SYSTEM = 300  # tokens


@dataclass
class Counts:
    """Of decoded tokens: how many lay in one piece, and in place as a device with whole spans needs it."""

    tokens: int = 0
    in_row: int = 0
    in_place: int = 0
    seconds: float = 0.0

    def add(self, table: list[int], length: int, num_blocks: int) -> None:
        blocks = np.array(table[: -(-length // BLOCK_SIZE)])
        held = blocks[blocks > 0]
        row = bool((np.diff(held) == 1).all())
        span = span_of(length - BLOCK_SIZE * (len(blocks) - len(held)))
        self.tokens += 1
        self.in_row += row
        self.in_place += row and int(held[0]) * BLOCK_SIZE + span <= num_blocks * BLOCK_SIZE


@dataclass
class User:
    rng: random.Random
    context: int
    system: list[int]
    history: list[int] = field(default_factory=list)
    turns: int = 0

    def next_prompt(self) -> tuple[list[int], int]:
        """The conversation with one more message, and the length of the answer to come."""
        message = [self.rng.randrange(1000) for _ in range(self.rng.randint(20, 200))]
        answer = self.rng.randint(20, 400)
        if not self.turns or len(self.history) + len(message) + answer >= self.context:
            self.history, self.turns = list(self.system), self.rng.randint(3, 8)
        self.turns -= 1
        self.history = self.history + message
        return self.history, answer


def simulate(
    users: int,
    num_blocks: int,
    requests: int,
    context: int,
    window: int | None = None,
    shared: bool = True,
    in_place: int = 4,
    seed: int = 1,
) -> Counts:
    """Run so many requests to their end."""
    rng = random.Random(seed)
    kv = KVManager([KVGroup((0,), window, num_blocks)], BLOCK_SIZE, in_place)
    scheduler = Scheduler(kv, users, 512, context, 1)
    people = {i: User(random.Random(seed + i), context, [7 if shared else i] * SYSTEM) for i in range(users)}
    live: dict[str, tuple[int, int]] = {}
    counts, sent = Counts(), 0
    idle = list(people)
    while live or sent < requests:
        while idle and sent < requests:
            who = idle.pop()
            prompt, answer = people[who].next_prompt()
            request = Request(f"r{sent}", prompt, SamplingParams(max_tokens=answer, ignore_eos=True))
            scheduler.add(request)
            live[request.request_id] = (who, len(prompt))
            sent += 1
        start = time.perf_counter()
        step = scheduler.schedule()
        counts.seconds += time.perf_counter() - start
        assert step is not None
        for request, count in zip(step.requests, step.num_scheduled_tokens, strict=True):
            if count == 1:
                counts.add(request.block_tables[0], request.num_computed_tokens, num_blocks)
        sampled = [rng.randrange(1000) if due else None for due in step.sampled]
        for request in scheduler.update(step, sampled, {}):
            who, _ = live.pop(request.request_id)
            people[who].history = people[who].history + request.output_token_ids
            idle.append(who)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    args = parser.parse_args()
    print("users  pool tokens  window  shared   in one piece   in place   us/token of scheduling")
    for users, pool, window, shared in (
        (1, 4096, None, True),
        (1, 8192, None, True),
        (1, 32768, None, True),
        (1, 2048, 512, True),
        (4, 32768, None, True),
        (4, 32768, None, False),
        (16, 65536, None, True),
        (16, 65536, None, False),
        (16, 262144, None, False),
        (16, 16384, 512, False),
    ):
        c = simulate(users, pool // BLOCK_SIZE + 1, args.requests, 4096, window, shared)
        print(
            f"{users:5}  {pool:11}  {window or '-':>6}  {'yes' if shared else 'no':>6}  "
            f"{c.in_row / c.tokens:12.1%}  {c.in_place / c.tokens:9.1%}   {1e6 * c.seconds / c.tokens:8.1f}"
        )


if __name__ == "__main__":
    main()
