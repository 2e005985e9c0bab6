"""Everything between a client's words and token ids, off the event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from hetero.request import RequestError
from hetero.text.grammar import Grammar, GrammarCompiler
from hetero.text.parts import PartsParser, marks_of, parser_for
from hetero.text.template import ChatTemplate, TemplateError
from hetero.text.tokenizer import Tokenizer

T = TypeVar("T")
TEXT_THREADS = 2
TAIL_TOKENS = 64  # of the prompt's end, from which a parser sees what the template has opened


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation ready to be generated. Each answer needs a fork of `grammar` and a parser of its own;
    `shown` are control tokens that the parser must see in the text, with their bytes."""

    token_ids: list[int]
    grammar: Grammar | None
    new_parser: Callable[[], PartsParser]
    shown: Mapping[int, bytes]


class TextService:
    """A model's tokenizer, chat template and grammars. Its coroutines work in threads of its own."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, grammars: GrammarCompiler):
        self._tokenizer = tokenizer
        self._template = template
        self._grammars = grammars
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, str] = "none",
        parallel_tool_calls: bool = True,
        output: Mapping[str, Any] | None = None,
        thinking: bool | str | None = None,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """The prompt for a conversation, what its answer must look like, and how to read that.

        Messages and tools have the shape of OpenAI's chat API. `tool_choice` is "auto", "none", "required"
        or {"name": tool}; `output` is a `response_format`; `thinking` None leaves reasoning to the template,
        else it says whether, or how much ("low", "medium", "high"). RequestError names the field at fault:
        messages, tools, tool_choice or response_format.
        """
        template = self._template
        if template is None:
            raise RequestError(
                "this model has no chat template; start with --chat-template FILE, or use /v1/completions",
                field="messages",
            )
        grammar = await self.compile_grammar(output)
        kwargs = dict(template_kwargs or {})
        if thinking is not None:
            kwargs.setdefault("enable_thinking", bool(thinking))
            if isinstance(thinking, str):
                kwargs.setdefault("reasoning_effort", thinking)

        def work() -> ChatPrompt:
            segments = template.render(
                messages, tools=list(tools) or None, continue_final_message=continue_final_message, **kwargs
            )
            ids = self._tokenizer.encode_segments(segments, add_special=True)
            tail = "".join(text for text, _ in segments)[-4 * TAIL_TOKENS :]
            new_parser = functools.partial(
                parser_for, template.source, tools, tool_choice, tail, parallel_tool_calls
            )
            marks = marks_of(template.source, bool(tools) and tool_choice != "none")
            return ChatPrompt(ids, grammar, new_parser, self._shown(marks))

        try:
            return await self._in_thread(work)
        except TemplateError as error:
            raise RequestError(str(error), field="messages") from error

    def _shown(self, marks: Iterable[str]) -> dict[int, bytes]:
        """The control tokens among `marks`, with their text's bytes."""
        ids = self._tokenizer.control_texts if marks else {}
        return {ids[mark]: mark.encode() for mark in marks if mark in ids}

    async def tokenize(self, text: str, *, parse_special: bool = True, add_special: bool = True) -> list[int]:
        """Token ids of a text; `add_special` adds BOS where the model wants it."""
        encode = functools.partial(
            self._tokenizer.encode, text, parse_special=parse_special, add_special=add_special
        )
        return await self._in_thread(encode)

    async def compile_grammar(self, response_format: Mapping[str, Any] | None) -> Grammar | None:
        """None when any text will do. RequestError, field `response_format`, if it cannot be enforced."""
        if response_format is None:
            return None
        try:
            return await self._in_thread(functools.partial(self._grammars.compile, dict(response_format)))
        except ValueError as error:
            raise RequestError(str(error), field="response_format") from error

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    @property
    def template_source(self) -> str:
        """The chat template, "" where there is none."""
        return "" if self._template is None else self._template.source

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
