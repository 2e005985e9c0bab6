"""Names of the files of a split model: NAME-00001-of-00003.gguf and so on, as in llama.cpp."""

from __future__ import annotations

import re
from typing import NamedTuple

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<parts>\d{5})\.gguf", re.DOTALL)


class PartName(NamedTuple):
    """A file name taken apart. `number` counts from 1."""

    name: str
    number: int
    parts: int


def parse_part_name(file_name: str) -> PartName | None:
    """What a file's name says about its place in a split model; None for any other name."""
    found = _PART.fullmatch(file_name)
    if found is None:
        return None
    part = PartName(found["name"], int(found["number"]), int(found["parts"]))
    return part if 1 <= part.number <= part.parts else None


def part_ending(number: int, parts: int) -> str:
    """How the name of part `number` (from 1) ends."""
    return f"-{number:05d}-of-{parts:05d}.gguf"
