"""Tiny crowded worlds for the scheduler, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hetero.kv.groups import KVGroup
from hetero.request import Request
from hetero.sampling.params import SamplingParams

RECURRENT = 0  # in place of a window
WINDOWS: list[list[int | None]] = [[None], [None], [None, 5], [None, 3, 9], [6], [3, 7], [None, None], [1]]
STATES: list[list[int | None]] = [[None, RECURRENT], [None, RECURRENT], [None, 5, RECURRENT]]


@dataclass
class Case:
    """What a seed stands for."""

    groups: list[KVGroup]
    block_size: int
    depth: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    requests: list[Request]
    arrivals: list[int]
    cancel_rate: float = 0.0
    failure_rate: float = 0.0
    in_place: int = 0
    drafts: bool = False
    host_slots: list[int] = field(default_factory=list)  # per group; []: no such tier
    below: bool = False  # a tier below that
    move_seconds: float = 0.0  # what a block costs to move, beside 1 for a token; 0: as guessed


def draw_case(rng: random.Random, tiers: bool = False) -> Case:
    """A tiny, crowded world. `tiers`: one in which nothing is kept that no lower tier can hold."""
    size = rng.choice([1, 2, 4])
    crowd = rng.random() < 0.3  # short prompts, long answers: the pool fills up on the way
    windows: list[int | None] = rng.choice(WINDOWS if tiers else WINDOWS + STATES)
    longest = rng.choice([12, 24, 40])
    turns = not crowd and rng.random() < 0.4  # the same long beginnings over and over, more than fit
    groups = []
    for window in windows:
        least = longest // size if window is None else min(longest, window + 2 * size) // size
        ratio = rng.choice([1, 1, 1.2, 1.5] if turns else [0.7, 1, 1, 1.2, 1.5, 2, 5])
        blocks = 3 + rng.choice([0, 0, 1, 3, 8, 20]) if window == RECURRENT else 2 + int(least * ratio)
        groups.append(KVGroup((len(groups),), window, blocks, recurrent=window == RECURRENT))
    stems = [[rng.randrange(3) for _ in range(rng.randrange(longest))] for _ in range(rng.randint(1, 3))]
    requests, arrivals, now = [], [], 0
    if turns:
        stems = [[rng.randrange(3) for _ in range(longest - 4)] for _ in range(rng.randint(2, 4))]
    for i in range(rng.randint(2, 14 if turns else 9)):
        stem = rng.choice(stems)
        keep = longest - 4 - rng.choice([0, 0, rng.randrange(8)]) if turns else rng.randrange(len(stem) + 1)
        prompt = stem[:keep] + [rng.randrange(3) for _ in range(rng.randint(0, 6))]
        max_tokens = None if crowd else rng.choice([None, 1, rng.randint(1, 16)])
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=crowd or rng.random() < 0.5)
        if crowd:
            prompt = prompt[-4:]
        scope = rng.choice(["", "", "", "other"])
        requests.append(Request(f"r{i}", prompt[: longest - 1] or [0], params, cache_scope=scope))
        now += rng.choice([0, 3, 12, 20] if turns else [0, 0, 0, 1, 3, 12])
        arrivals.append(now)
    draw_kinds(random.Random(repr([r.prompt_token_ids for r in requests])), requests)
    return Case(
        groups,
        size,
        depth=rng.choice([1, 1, 2, 3]),
        max_num_seqs=8 if crowd else rng.choice([1, 2, 4, 8]),
        max_num_batched_tokens=rng.choice([1, 3, 8, 32]),
        max_model_len=longest,
        requests=requests,
        arrivals=arrivals,
        cancel_rate=rng.choice([0, 0, 0.05, 0.2]),
        failure_rate=rng.choice([0, 0, 0, 0.05]),
        in_place=(0, 1, 4)[len(requests) % 3],
        drafts=rng.random() < 0.5,
        host_slots=draw_slots(rng, groups),
        below=rng.random() < 0.4 and RECURRENT not in windows,
        move_seconds=rng.choice([0, 0, 0, 0.1, 1, 30]),
    )


def draw_kinds(rng: random.Random, requests: list[Request]) -> None:
    """None, some or all of the requests are for embeddings; all are as important, or not."""
    share, priorities = rng.choice([0, 0, 0, 0.3, 0.6, 1]), rng.choice([[0], [0], [0, 1], [-3, 0, 0, 1000]])
    for request in requests:
        request.priority = rng.choice(priorities)
        if rng.random() < share:
            request.pooling = rng.choice(["mean", "cls", "last"])


def draw_slots(rng: random.Random, groups: list[KVGroup]) -> list[int]:
    """Host slots per group: none at all, none in some, a few, or room for everything."""
    if rng.random() < 0.2 or any(group.recurrent for group in groups):  # host memory has no states
        return []
    return [
        rng.choice([0, 1, 3, group.num_blocks, group.num_blocks, 4 * group.num_blocks]) for group in groups
    ]
