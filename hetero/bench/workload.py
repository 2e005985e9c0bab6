"""What a benchmark asks: sessions of one or more turns, drawn from a seed.

    session   | turn 0: prompt, answer | pause | turn 1: all before + a tool's result, answer | ...

Every workload is drawn anew for each seed, so that no cache is warm by accident, and the same for the same
seed, so that several servers get the same text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero.bench import texts
from hetero.bench.distributions import Lengths

Message = dict[str, Any]
LARGEST_FILE = 1 << 30


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


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _chat(rng: random.Random, prompt: int, output: int, shared: str) -> Session:
    return Session((Turn((_user(texts.words(rng, prompt)),), output),))


def _shared_prefix(rng: random.Random, prompt: int, output: int, shared: str) -> Session:
    return Session((Turn((_system(shared), _user(texts.words(rng, prompt))), output),))


def _code_edit(rng: random.Random, prompt: int, output: int, shared: str) -> Session:
    source = texts.source_file(rng, prompt)
    ask = f"Rename `result` to `found` in this file and print all of it.\n\n```python\n{source}\n```"
    return Session((Turn((_user(ask),), output),))


def _agent(rng: random.Random, prompt: int, output: int, shared: str) -> Session:
    """A task, then results of tools after pauses: files that were read, and what commands have said."""
    task = f"{shared}\n\nTask: {texts.words(rng, prompt)}"
    turns = [Turn((_user(task),), output)]
    for number in range(rng.randint(2, 5)):
        found = texts.source_file(rng, rng.randint(100, 400))
        result = f"Result of tool call {number}:\n{found}\nexit status 0"
        turns.append(Turn((_user(result),), output, rng.expovariate(1.0)))
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


@dataclass(frozen=True, slots=True)
class Recorded:
    """Sessions of a file, with their times of arrival if it has them."""

    name: str
    title: str
    recorded: tuple[Session, ...] = field(repr=False)

    def sessions(self, seed: int | str, count: int, sizes: Sizes) -> list[Session]:
        """The first `count` of them."""
        if sizes.prompt is not None or sizes.output is not None:
            raise WorkloadError(f"{self.name}: a recorded workload has lengths of its own")
        return list(self.recorded[:count])


def find_workload(name: str) -> Workload | Recorded:
    """A workload by its name, or the file of that name. Raises WorkloadError."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    path = Path(name)
    if path.suffix != ".jsonl" and not path.is_file():
        raise WorkloadError(f"{name}: neither a .jsonl file nor one of {', '.join(WORKLOADS)}")
    return read_jsonl(path)


def read_jsonl(path: Path) -> Recorded:
    """A file with one request a line. Raises WorkloadError naming the line.

    {"messages": [...]} or {"prompt": "..."}, with optional "max_tokens" and "at" (seconds from the start);
    or, as `hetero bench --record` writes it, without any text:
    {"at": 1.25, "prompt_tokens": 812, "output_tokens": 64, "blocks": ["9f3c...", ...]}, where equal names
    of blocks of 16 tokens stand for equal beginnings of prompts.
    """
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise WorkloadError(f"{path}: larger than 1 GiB")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: {error}") from None
    sessions = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            sessions.append(_read_line(json.loads(line)))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise WorkloadError(f"{path}, line {number}: {error}") from None
    if not sessions:
        raise WorkloadError(f"{path}: no request in it")
    return Recorded(path.name, f"{len(sessions)} recorded requests", tuple(sessions))


def _read_line(line: Any) -> Session:
    if not isinstance(line, dict):
        raise ValueError("is not an object")
    at = line.get("at")
    if at is not None and (isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < 1e7):
        raise ValueError("at: must be seconds from the start")
    if "prompt_tokens" in line:
        text = text_of_blocks(_blocks(line.get("blocks")), _count(line, "prompt_tokens"))
        return Session((Turn((_user(text),), _count(line, "output_tokens")),), at)
    limit = _count(line, "max_tokens") if line.get("max_tokens") is not None else 128
    if isinstance(line.get("prompt"), str):
        return Session((Turn((_user(line["prompt"]),), limit),), at)
    messages = line.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise ValueError("needs messages, prompt or prompt_tokens")
    return Session((Turn(tuple(messages), limit),), at)


def _count(line: dict[str, Any], name: str) -> int:
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10_000_000:
        raise ValueError(f"{name}: must be a whole number of tokens")
    return value


def _blocks(value: Any) -> Sequence[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise ValueError("blocks: must be a list of names")
    return value


def text_of_blocks(names: Sequence[str], tokens: int, block_size: int = 16) -> str:
    """Words in place of text that nobody kept: the same where the names of blocks are the same."""
    parts = [texts.words(random.Random(name), block_size) for name in names[: tokens // block_size]]
    rest = tokens - block_size * len(parts)
    tail = random.Random(f"{names[-1] if names else ''}/{tokens}/rest")
    return " ".join([*parts, texts.words(tail, rest)] if rest > 0 else parts)
