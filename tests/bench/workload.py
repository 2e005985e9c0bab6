"""What is asked of both servers: fresh random text every time, so that no cache is warm by accident."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from hetero.bench.texts import WORDS


@dataclass(frozen=True, slots=True)
class Job:
    """One completion: the prompt's text and how many tokens to generate after it."""

    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs that arrive at once, drawn anew for each repetition, and what is measured of them."""

    name: str
    title: str
    draw: Callable[[random.Random], list[Job]]
    metrics: tuple[str, ...]


def text(rng: random.Random, words: int) -> str:
    """Random words: about as many tokens."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


def one_stream(rng: random.Random) -> list[Job]:
    return [Job(text(rng, 128), 128)]


def long_prompt(rng: random.Random) -> list[Job]:
    return [Job(text(rng, 2000), 1)]


def shared_prefix(rng: random.Random) -> list[Job]:
    prefix = text(rng, 1200)
    return [Job(f"{prefix} {text(rng, 100)}", 64) for _ in range(16)]


def no_shared_prefix(rng: random.Random) -> list[Job]:
    return [Job(text(rng, rng.randint(128, 300)), 64) for _ in range(16)]


def sixteen_decoding(rng: random.Random) -> list[Job]:
    return [Job(text(rng, 16), 128) for _ in range(16)]


WORKLOADS = (
    Workload("decode", "one stream, 128-token prompt, 128 out", one_stream, ("decode tok/s",)),
    Workload("prefill", "one prompt of 2,000 tokens", long_prompt, ("prefill tok/s",)),
    Workload(
        "shared",
        "16 clients, 1,200 shared + 100 own tokens, 64 out",
        shared_prefix,
        ("output tok/s", "p95 TTFT s"),
    ),
    Workload(
        "distinct",
        "16 clients, 128-300 tokens each, 64 out",
        no_shared_prefix,
        ("output tok/s", "p95 TTFT s"),
    ),
)
