"""What a benchmark asks: sessions of one or more turns, drawn from a seed.

    session   | turn 0: prompt, answer | pause | turn 1: all before + a tool's result, answer | ...

Every workload is drawn anew for each seed, so that no cache is warm by accident, and the same for the same
seed, so that several servers get the same text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetero.bench import texts
from hetero.bench.distributions import Lengths

Message = dict[str, Any]


class WorkloadError(ValueError):
    """A workload that cannot be used: one line."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What comes after the answer so far: `messages` to add, an answer of `max_tokens`, a `pause` before."""

    messages: tuple[Message, ...]
    max_tokens: int
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """One user's turns. `arrival`: seconds from the start, where the workload says so itself."""

    turns: tuple[Turn, ...]
    arrival: float | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of prompts and answers, in place of a workload's own."""

    prompt: Lengths | None = None
    output: Lengths | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """`draw(rng, prompt tokens, output tokens, shared text)` makes a session.

    `shared_tokens` of text are the same in all sessions of a run.
    """

    name: str
    title: str
    prompt: Lengths
    output: Lengths
    draw: Callable[[random.Random, int, int, str], Session]
    shared_tokens: int = 0

    def sessions(self, seed: int | str, count: int, sizes: Sizes) -> list[Session]:
        """`count` sessions, the same for the same seed."""
        rng = random.Random(f"{self.name}/{seed}")
        shared = texts.words(rng, self.shared_tokens) if self.shared_tokens else ""
        prompt, output = sizes.prompt or self.prompt, sizes.output or self.output
        return [self.draw(rng, prompt.draw(rng), output.draw(rng), shared) for _ in range(count)]


def user_message(text: str) -> Message:
    return {"role": "user", "content": text}


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _chat(rng: random.Random, prompt: int, output: int, shared: str) -> Session:
    return Session((Turn((user_message(texts.words(rng, prompt)),), output),))


def _shared_prefix(rng: random.Random, prompt: int, output: int, shared: str) -> Session:
    return Session((Turn((_system(shared), user_message(texts.words(rng, prompt))), output),))


def _code_edit(rng: random.Random, prompt: int, output: int, shared: str) -> Session:
    source = texts.source_file(rng, prompt)
    ask = f"Rename `result` to `found` in this file and print all of it.\n\n```python\n{source}\n```"
    return Session((Turn((user_message(ask),), output),))


def _agent(rng: random.Random, prompt: int, output: int, shared: str) -> Session:
    """A task, then results of tools after pauses: files that were read, and what commands have said."""
    task = f"{shared}\n\nTask: {texts.words(rng, prompt)}"
    turns = [Turn((user_message(task),), output)]
    for number in range(rng.randint(2, 5)):
        found = texts.source_file(rng, rng.randint(100, 400))
        result = f"Result of tool call {number}:\n{found}\nexit status 0"
        turns.append(Turn((user_message(result),), output, rng.expovariate(1.0)))
    return Session(tuple(turns))


WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload(
            "chat",
            "questions of people, nothing shared",
            Lengths("lognormal", 180, 0.8),
            Lengths("lognormal", 120, 0.6),
            _chat,
        ),
        Workload(
            "shared-prefix",
            "one long system prompt, short questions",
            Lengths("uniform", 50, 150),
            Lengths("fixed", 64),
            _shared_prefix,
            shared_tokens=1200,
        ),
        Workload(
            "long-prompt",
            "documents with short answers",
            Lengths("uniform", 1500, 3000),
            Lengths("fixed", 64),
            _chat,
        ),
        Workload(
            "code-edit",
            "a file that the answer repeats with changes",
            Lengths("fixed", 600),
            Lengths("fixed", 400),
            _code_edit,
        ),
        Workload(
            "agent",
            "several turns with tool results and pauses, one system prompt",
            Lengths("uniform", 30, 120),
            Lengths("uniform", 30, 120),
            _agent,
            shared_tokens=800,
        ),
    )
}
