"""Everything between a client's words and token ids, off the event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from hetero.request import RequestError
from hetero.text.fill_in import OtherFile, fill_in_prompt
from hetero.text.grammar import Grammar, GrammarCompiler
from hetero.text.output import OutputError
from hetero.text.parts import PartsParser, capabilities, marks_of, parser_for
from hetero.text.reasoning import left_open
from hetero.text.special import FimTokens, fim_tokens
from hetero.text.template import ChatTemplate, TemplateError, content_text
from hetero.text.tokenizer import Tokenizer
from hetero.text.tools.choice import choose
from hetero.text.tools.families import HARMONY, family_of, takes_tools
from hetero.text.tools.harmony import with_thinking
from hetero.text.tools.prompt import for_template, in_plain_messages

T = TypeVar("T")
TEXT_THREADS = 2
TAIL_CHARS = 256  # of the prompt's end, from which a parser sees what the template has opened


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation ready to be generated, and its text. Each answer needs a fork of `grammar` and a parser
    of its own; `shown` are control tokens that the parser must see in the text, with their bytes.
    """

    token_ids: list[int]
    text: str
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
        # Of their own: a grammar may take a second, and conversations without one need not wait for it.
        self._compilers = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="grammar")

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

        Messages and tools have the shape of OpenAI's chat API. `tool_choice` is "auto", "none", "required",
        {"name": tool}, or {"names": [...], "mode": "auto" or "required"}; `output` is as in
        hetero.text.output; `thinking` None leaves reasoning to the template, else it says whether, or how
        much ("low", "medium", "high"). RequestError names the field at fault: messages, tools, tool_choice
        or what `output` calls itself.
        """
        template = self._template
        if template is None:
            raise RequestError(
                "this model has no chat template; start with --chat-template FILE, or use /v1/completions",
                field="messages",
            )
        chosen, forced, several = choose(tools, tool_choice, parallel_tool_calls)
        variables = {**_thinking(template.source, thinking), **(template_kwargs or {})}
        given, told = messages, for_template(chosen) or None
        if family_of(template.source) is HARMONY:
            given = with_thinking(messages)
        if not takes_tools(template.source):
            given, told = in_plain_messages(messages, chosen), None

        def render() -> tuple[list[int], str]:
            segments = template.render(
                given, tools=told, continue_final_message=continue_final_message, **variables
            )
            ids = self._tokenizer.encode_segments(segments, add_special=True)
            return ids, "".join([text for text, _ in segments])

        try:
            ids, text = await self._in_thread(render)
        except TemplateError as error:
            raise RequestError(str(error), field="messages") from error
        tail, grammar = text[-TAIL_CHARS:], None
        if continue_final_message:
            tail += left_open(content_text(messages[-1].get("content"), "messages"), template.source)
        if forced or output is not None:
            grammar = await self._compile(
                output, tools=chosen, several=several, template=template.source, prompt_tail=tail
            )
        new_parser = functools.partial(parser_for, template.source, chosen, tail, parallel_tool_calls)
        return ChatPrompt(
            ids, text, grammar, new_parser, self._shown(marks_of(template.source, bool(chosen)))
        )

    def _shown(self, marks: Iterable[str]) -> dict[int, bytes]:
        """The control tokens among `marks`, with their text's bytes."""
        ids, pattern = self._tokenizer.control_texts, self._tokenizer.control_pattern
        return {ids[text]: text.encode() for mark in marks for text in pattern.findall(mark)}

    async def tokenize(self, text: str, *, parse_special: bool = True, add_special: bool = True) -> list[int]:
        """Token ids of a text; `add_special` adds BOS where the model wants it."""
        encode = functools.partial(
            self._tokenizer.encode, text, parse_special=parse_special, add_special=add_special
        )
        return await self._in_thread(encode)

    async def fill_in(
        self, before: str, after: str, files: Sequence[OtherFile] = (), begun: str = ""
    ) -> list[int]:
        """The prompt for what stands between two texts, see fill_in_prompt. RequestError names `suffix` for a
        model that was not taught that."""
        fim = self._fim
        if fim is None:
            raise RequestError("suffix: this model has no tokens for filling in the middle", "suffix")
        work = functools.partial(fill_in_prompt, self._tokenizer, fim, before, after, files, begun)
        return await self._in_thread(work)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the chat template makes of a conversation. RequestError names `messages`."""
        prompt = await self.chat(
            messages, continue_final_message=continue_final_message, template_kwargs=template_kwargs
        )
        return prompt.text

    @functools.cached_property
    def _fim(self) -> FimTokens | None:
        return fim_tokens(self._tokenizer)

    async def compile_grammar(self, output: Mapping[str, Any] | None) -> Grammar | None:
        """For an answer without a conversation; None when any text will do. RequestError names the field if
        it cannot be enforced."""
        return None if output is None else await self._compile(output)

    async def warm_up(self) -> None:
        """What the first grammar would wait for: the vocabulary's index.

        It takes 0.1 s for 50,000 tokens and a second for 260,000, in which the interpreter does nothing else.
        """
        await asyncio.get_running_loop().run_in_executor(self._compilers, self._grammars.warm_up)

    async def _compile(self, output: Mapping[str, Any] | None, **kwargs: Any) -> Grammar | None:
        work = functools.partial(self._grammars.compile, output, **kwargs)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._compilers, work)
        except OutputError as error:
            raise RequestError(str(error), field=error.field) from error

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

    @property
    def special_texts(self) -> tuple[str, str]:
        """How BOS and EOS are written; "" where the model has none."""
        ids = self._tokenizer.bos_id, self._tokenizer.eos_id
        bos, eos = ("" if i is None else self._tokenizer.token_text(i) for i in ids)
        return bos, eos

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What the model can do, in Ollama's words: "completion", "tools", "thinking", "insert"."""
        able = capabilities(None if self._template is None else self._template.source)
        return able if self._fim is None else (*able, "insert")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._compilers.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _thinking(template: str, thinking: bool | str | None) -> dict[str, Any]:
    """The variables by which templates are told whether to reason, or how much."""
    if thinking is None:
        return {}
    variables: dict[str, Any] = {"enable_thinking": bool(thinking), "thinking": bool(thinking)}
    if isinstance(thinking, str):
        variables["reasoning_effort"] = thinking
    elif not thinking and family_of(template) is HARMONY:  # it cannot but reason
        variables["reasoning_effort"] = "low"
    return variables
