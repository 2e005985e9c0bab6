"""All of one answer, for routes that give it in one piece."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hetero.request import OutputDelta, TokenLogprob
from hetero.text.parts import Part, ReasoningPart, TextPart, ToolCallArguments, ToolCallStart


@dataclass(slots=True)
class Piece:
    """What is new in choice `index`. The last piece of a choice has `finish`: stop, length or tool_calls.

    `delta` holds the tokens behind it; their text may not be out yet, or belong to no part.
    """

    index: int
    parts: list[Part]
    delta: OutputDelta
    finish: str | None = None


@dataclass(slots=True)
class Call:
    """A tool call; `arguments` are JSON, unless the answer was cut off."""

    index: int
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Text:
    text: str = ""


@dataclass(slots=True)
class Reasoning:
    text: str = ""


Block = Text | Reasoning | Call


class Change(NamedTuple):
    """What a piece does to block `position`: it opens it, adds `text`, or closes it, and then it is whole."""

    kind: Literal["open", "more", "close"]
    position: int
    block: Block
    text: str = ""


@dataclass(slots=True)
class Collected:
    """One choice: its blocks in order, neighbours of a kind joined, and all its tokens."""

    blocks: list[Block] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str = ""
    stop_string: str | None = None
    _pieces: list[str] = field(default_factory=list)  # of the last block, joined when it ends

    def add(self, piece: Piece) -> list[Change]:
        """Take in a piece; what that does to the blocks, in order."""
        changes: list[Change] = []
        for part in piece.parts:
            self._add(part, changes)
        self.token_ids += piece.delta.token_ids
        self.logprobs += piece.delta.logprobs
        if piece.finish is not None:
            self.finish = piece.finish
            self.stop_string = piece.delta.stop_string
            self._close(changes)
        return changes

    def _add(self, part: Part, changes: list[Change]) -> None:
        last = self.blocks[-1] if self.blocks else None
        if isinstance(part, ToolCallStart):
            self._open(Call(part.index, part.id, part.name), changes)
            return
        if isinstance(part, TextPart) and not isinstance(last, Text):
            last = self._open(Text(), changes)
        elif isinstance(part, ReasoningPart) and not isinstance(last, Reasoning):
            last = self._open(Reasoning(), changes)
        elif isinstance(part, ToolCallArguments):
            assert isinstance(last, Call) and last.index == part.index
        assert last is not None
        self._pieces.append(part.text)
        changes.append(Change("more", len(self.blocks) - 1, last, part.text))

    def _open(self, block: Block, changes: list[Change]) -> Block:
        self._close(changes)
        self.blocks.append(block)
        changes.append(Change("open", len(self.blocks) - 1, block))
        return block

    def _close(self, changes: list[Change]) -> None:
        if not self.blocks:
            return
        last, text = self.blocks[-1], "".join(self._pieces)
        if isinstance(last, Call):
            last.arguments = text
        else:
            last.text = text
        self._pieces.clear()
        changes.append(Change("close", len(self.blocks) - 1, last))

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.blocks if isinstance(block, Text))

    @property
    def reasoning(self) -> str:
        return "".join(block.text for block in self.blocks if isinstance(block, Reasoning))

    @property
    def calls(self) -> list[Call]:
        return [block for block in self.blocks if isinstance(block, Call)]
