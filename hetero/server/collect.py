"""All of one answer, for routes that give it in one piece."""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Collected:
    """One choice: its blocks in order, neighbours of a kind joined, and all its tokens."""

    blocks: list[Block] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str = ""
    stop_string: str | None = None
    _pieces: list[str] = field(default_factory=list)  # of the last block, joined when it ends

    def add(self, piece: Piece) -> None:
        for part in piece.parts:
            self._add(part)
        self.token_ids += piece.delta.token_ids
        self.logprobs += piece.delta.logprobs
        if piece.finish is not None:
            self._close()
            self.finish = piece.finish
            self.stop_string = piece.delta.stop_string

    def _add(self, part: Part) -> None:
        last = self.blocks[-1] if self.blocks else None
        if isinstance(part, ToolCallStart):
            self._open(Call(part.index, part.id, part.name))
            return
        if isinstance(part, TextPart) and not isinstance(last, Text):
            self._open(Text())
        elif isinstance(part, ReasoningPart) and not isinstance(last, Reasoning):
            self._open(Reasoning())
        elif isinstance(part, ToolCallArguments):
            assert isinstance(last, Call) and last.index == part.index
        self._pieces.append(part.text)

    def _open(self, block: Block) -> None:
        self._close()
        self.blocks.append(block)

    def _close(self) -> None:
        if not self._pieces:
            return
        last, text = self.blocks[-1], "".join(self._pieces)
        if isinstance(last, Call):
            last.arguments = text
        else:
            last.text = text
        self._pieces.clear()

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.blocks if isinstance(block, Text))

    @property
    def reasoning(self) -> str:
        return "".join(block.text for block in self.blocks if isinstance(block, Reasoning))

    @property
    def calls(self) -> list[Call]:
        return [block for block in self.blocks if isinstance(block, Call)]
