"""Workloads out of files: requests that somebody wrote down, or `hetero bench --record` did."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetero.bench import texts
from hetero.bench.workload import WORKLOADS, Session, Sizes, Turn, Workload, WorkloadError, user_message

LARGEST_FILE = 1 << 30
BLOCK_TOKENS = 16  # of a name in "blocks"


@dataclass(frozen=True, slots=True)
class Shape:
    """A request of which only lengths in tokens are known, and which beginnings it shares with others."""

    prompt: int
    output: int
    blocks: tuple[str, ...] = field(repr=False)
    arrival: float | None = None

    def session(self, seed: int | str) -> Session:
        """With words in place of the text: the same where blocks are the same, others for another seed."""
        text = text_of_blocks(self.blocks, self.prompt, seed)
        return Session((Turn((user_message(text),), self.output),), self.arrival)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Requests of a file, with their times of arrival if it has them."""

    name: str
    title: str
    recorded: tuple[Session | Shape, ...] = field(repr=False)

    @property
    def is_timed(self) -> bool:
        return all(entry.arrival is not None for entry in self.recorded)

    @property
    def has_text(self) -> bool:
        """Whether it asks the same text again, whatever the seed."""
        return any(isinstance(entry, Session) for entry in self.recorded)

    def sessions(self, seed: int | str, count: int, sizes: Sizes) -> list[Session]:
        """The first `count` of them."""
        if sizes.prompt is not None or sizes.output is not None:
            raise WorkloadError(f"{self.name}: a recorded workload has lengths of its own")
        return [e if isinstance(e, Session) else e.session(seed) for e in self.recorded[:count]]

    def parts(self, seconds: float | None) -> list[Recorded]:
        """Parts that have no request in common, so that one can prove what was found with another.

        Stretches of `seconds` as they arrived, the busiest first; None: every other request. All of it
        where that gives but one part.
        """
        if seconds is None:
            halves = [self._part(self.recorded[i::2], 0.0) for i in (0, 1)]
            return halves if all(half.recorded for half in halves) else [self]
        stretches: dict[int, list[Session | Shape]] = {}
        for entry in self.recorded:
            stretches.setdefault(int((entry.arrival or 0.0) // seconds), []).append(entry)
        order = sorted(stretches, key=lambda number: (-len(stretches[number]), number))
        return [self._part(stretches[number], number * seconds) for number in order]

    def _part(self, entries: Sequence[Session | Shape], start: float) -> Recorded:
        moved = (e if e.arrival is None else replace(e, arrival=e.arrival - start) for e in entries)
        return replace(self, recorded=tuple(moved))


def drawn_anew(workload: Workload | Recorded) -> Workload | Recorded:
    """One whose text each seed changes, for requests that must not bring what is measured into a cache."""
    return WORKLOADS["chat"] if isinstance(workload, Recorded) and workload.has_text else workload


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
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: {error}") from None
    entries = []
    for number, line in enumerate(text.split("\n"), 1):  # no other character ends a line
        if not line.strip():
            continue
        try:
            entries.append(_read_line(json.loads(line)))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise WorkloadError(f"{path}, line {number}: {error}") from None
    if not entries:
        raise WorkloadError(f"{path}: no request in it")
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return Recorded(path.name, f"{len(entries)} recorded requests, digest {digest}", tuple(entries))


def _read_line(line: Any) -> Session | Shape:
    if not isinstance(line, dict):
        raise ValueError("is not an object")
    at = line.get("at")
    if at is not None and (isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < 1e7):
        raise ValueError("at: must be seconds from the start")
    if "prompt_tokens" in line:
        blocks = _blocks(line.get("blocks"))
        return Shape(_count(line, "prompt_tokens"), _count(line, "output_tokens"), tuple(blocks), at)
    limit = _count(line, "max_tokens") if line.get("max_tokens") is not None else 128
    if isinstance(line.get("prompt"), str):
        return Session((Turn((user_message(line["prompt"]),), limit),), at)
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


def text_of_blocks(names: Sequence[str], tokens: int, seed: int | str) -> str:
    """Words in place of text that nobody kept: the same where the names of blocks are the same."""
    whole = names[: tokens // BLOCK_TOKENS]
    parts = [texts.words(random.Random(f"{seed}/{name}"), BLOCK_TOKENS) for name in whole]
    rest = tokens - BLOCK_TOKENS * len(parts)
    tail = random.Random(f"{seed}/{names[-1] if names else ''}/{tokens}/rest")
    return " ".join([*parts, texts.words(tail, rest)] if rest > 0 else parts)
