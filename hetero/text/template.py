"""Chat messages to prompt text, by the model's own template."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta

from hetero.text.meter import MAX_CHARS, Meter, Refused, use
from hetero.text.sandbox import TemplateEnvironment
from hetero.text.tokenizer import Segment, Tokenizer
from quant.gguf import GGUFFile

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MAX_SOURCE_CHARS = 1 << 17  # the longest templates in use have 30 thousand
# Noncharacters, "not for interchange": two that the messages do not hold mark places in their texts.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
# Names that are ours to write and stay as they are, even where a vocabulary calls one a control token.
_FIELDS = frozenset(("role", "content", "tool_calls", "tool_call_id", "function", "name", "arguments"))

_environment = TemplateEnvironment()


@functools.lru_cache(maxsize=16)
def variables_of(source: str) -> frozenset[str]:
    """The variables that a template reads without having set them; none if it does not compile."""
    try:
        if len(source) > MAX_SOURCE_CHARS:
            return frozenset()
        return frozenset(meta.find_undeclared_variables(_environment.parse(source)))
    except Exception:
        return frozenset()


class TemplateError(ValueError):
    """These messages cannot become a prompt. The message is for the client: the template's own words."""


class ToolArguments(dict):
    """The arguments of a tool call: an object for templates that look inside, JSON when printed."""

    def __init__(self, source: str, value: dict):
        super().__init__(value)
        self._source = source

    def __str__(self) -> str:
        return self._source


class ChatTemplate:
    """One compiled template. `error` says why it cannot be used, if so; then no rendering succeeds."""

    def __init__(self, source: str, bos: str, eos: str, *, control_pattern: re.Pattern | None = None):
        """`bos` and `eos` are the texts of those tokens, "" where the model has none.

        `control_pattern` matches the control tokens of the vocabulary; what looks like one in a
        message is kept from becoming one.
        """
        self.source = source
        self.error: str | None = None
        self._constants = {"bos_token": bos, "eos_token": eos}
        self._control_pattern = control_pattern
        self._template: jinja2.Template | None = None
        try:
            if len(source) > MAX_SOURCE_CHARS:
                raise Refused(f"it has {len(source)} characters, more than {MAX_SOURCE_CHARS}")
            self._template = _environment.from_string(source)
        except Exception as error:
            self.error = f"the chat template is not usable: {_reason(error)}"

    @classmethod
    def from_gguf(cls, gguf: GGUFFile, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The model's template; ChatML if the vocabulary is made for it; None if there is no telling."""
        source = gguf.metadata.get("tokenizer.chat_template")
        if not isinstance(source, str):
            if not {"<|im_start|>", "<|im_end|>"} <= tokenizer.control_texts.keys():
                return None
            source = CHATML
        return cls.of(source, tokenizer)

    @classmethod
    def of(cls, source: str, tokenizer: Tokenizer) -> ChatTemplate:
        """A template for a model's tokens."""
        bos, eos = (
            "" if token_id is None else tokenizer.token_text(token_id)
            for token_id in (tokenizer.bos_id, tokenizer.eos_id)
        )
        return cls(source, bos, eos, control_pattern=tokenizer.control_pattern)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[Segment]:
        """The prompt for `messages`, in segments for `Tokenizer.encode_segments`.

        A control token is never read across the border of two segments: borders lie inside whatever
        looks like one in a message. With `continue_final_message` the prompt ends with the content
        of the last message, to be continued. Takes at most about 2 s, twice that where a call was cut off;
        raises TemplateError.
        """
        if self._template is None:
            raise TemplateError(self.error)
        chat = normalize_messages(messages)
        given: dict[str, Any] = {"messages": chat, "tools": list(tools) if tools else None, "kwargs": kwargs}
        free = _unused_noncharacters(given)
        end = ""
        if continue_final_message:
            add_generation_prompt = False
            end = free[0]
            if not chat or chat[-1]["role"] != "assistant":
                raise TemplateError("messages: only a last message of the assistant can be continued")
        marked = {name: self._marked(value, free[1]) for name, value in given.items()}
        if end:
            marked["messages"][-1]["content"] += end
        variables = {
            **marked["kwargs"],
            **self._constants,
            "messages": marked["messages"],
            "tools": marked["tools"],
            "documents": marked["kwargs"].get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._run(variables)
        except TemplateError:
            whole = _with_whole_calls(variables["messages"])
            if whole is None:
                raise
            text = self._run({**variables, "messages": whole})
        if end:
            text, found, _ = text.rpartition(end)
            if not found:
                raise TemplateError("the chat template leaves out the message that is to be continued")
        return [(part, True) for part in text.split(free[1]) if part]

    def _run(self, variables: dict[str, Any]) -> str:
        """The rendered text, within the limits of a Meter."""
        assert self._template is not None
        try:
            meter = Meter(variables)
            use(meter)
            pieces, size = [], 0
            for piece in self._template.root_render_func(self._template.new_context(variables)):
                meter.tick()
                pieces.append(piece)
                size += len(piece)
                if size > MAX_CHARS:
                    raise Refused(f"the prompt is longer than {MAX_CHARS} characters")
            return "".join(pieces)
        except Exception as error:
            raise TemplateError(_reason(error)) from None
        finally:
            use(None)

    def _marked(self, value: Any, mark: str) -> Any:
        """A deep copy of plain data where `mark` breaks everything that looks like a control token."""
        if isinstance(value, str):
            return self._break(value, mark)
        if isinstance(value, ToolArguments):
            items = {self._break(str(k), mark): self._marked(v, mark) for k, v in value.items()}
            return ToolArguments(self._break(str(value), mark), items)
        if isinstance(value, Mapping):
            return {
                key if key in _FIELDS else self._marked(key, mark): self._marked(v, mark)
                for key, v in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._marked(item, mark) for item in value]
        return value

    def _break(self, text: str, mark: str) -> str:
        pattern = self._control_pattern
        if pattern is None:
            return text
        parts, start, found = [], 0, pattern.search(text)
        while found:
            # After the first character, and the search goes on there: look-alikes may overlap.
            cut = found.start() + 1
            parts.append(text[start:cut])
            start, found = cut, pattern.search(text, cut)
        return mark.join((*parts, text[start:]))


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages in the form templates expect; TemplateError names the first that has none.

    Content becomes a string (text parts joined by a newline, None and no parts ""), role "developer" becomes
    "system", the system messages at the start become one, JSON arguments of tool calls are parsed.
    """
    chat: list[dict[str, Any]] = []
    system: list[str] = []  # texts of the system messages at the start
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TemplateError(f"{where} must be an object with a role")
        entry = dict(message)
        entry["role"] = "system" if entry["role"] == "developer" else entry["role"]
        entry["content"] = content_text(entry.get("content"), f"{where}.content")
        if isinstance(entry.get("tool_calls"), list):
            entry["tool_calls"] = [_parsed_call(call) for call in entry["tool_calls"]]
        if entry["role"] == "system" and len(chat) == bool(system):
            system.append(entry["content"])
            if len(system) > 1:
                continue
        chat.append(entry)
    if len(system) > 1:
        chat[0]["content"] = "\n\n".join(filter(None, system))
    return chat


def content_text(content: Any, where: str) -> str:
    """A message's content as one string. TemplateError, naming `where`, if it is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, (list, tuple)):
        raise TemplateError(f"{where} must be a string or a list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise TemplateError(f"{where}[{index}]: parts of type {kind!r} are not supported by this model")
        if not isinstance(part.get("text"), str):
            raise TemplateError(f"{where}[{index}].text must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def _parsed_call(call: Any) -> Any:
    """A tool call whose `function.arguments`, a string in the API, is an object as templates expect."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = function["arguments"] or "{}"  # some clients' way to say that there are none
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    if not isinstance(value, dict):
        return call
    return {**call, "function": {**function, "arguments": ToolArguments(arguments, value)}}


def _with_whole_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages with no arguments in calls whose arguments are no object: those of a call that was cut
    off, for one, which a template that looks inside cannot show. None if there are no such calls."""
    shown, found = [], False
    for message in messages:
        calls = message.get("tool_calls")
        whole: list[Any] = []
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping) and not isinstance(function.get("arguments"), Mapping):
                source = function.get("arguments")
                empty = ToolArguments(source if isinstance(source, str) else "{}", {})
                call, found = {**call, "function": {**function, "arguments": empty}}, True
            whole.append(call)
        shown.append({**message, "tool_calls": whole} if whole else dict(message))
    return shown if found else None


def _unused_noncharacters(value: Any) -> tuple[str, str]:
    """Two characters that occur in no string of `value`."""
    used: set[str] = set()
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            used.update(re.findall("[\ufdd0-\ufdef]", node))
        elif isinstance(node, Mapping):
            stack.extend(
                (*node.keys(), *node.values(), str(node) if isinstance(node, ToolArguments) else None)
            )
        elif isinstance(node, (list, tuple)):
            stack.extend(node)
    free = [char for char in _NONCHARACTERS if char not in used]
    if len(free) < 2:
        raise TemplateError("messages: the text uses all of Unicode's noncharacters U+FDD0 to U+FDEF")
    return free[0], free[1]


def _reason(error: Exception) -> str:
    """One line for the client, without paths or Python's own names."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    if isinstance(error, RecursionError):
        return "the chat template is nested too deeply"
    if isinstance(error, MemoryError):
        return "the chat template needs too much memory"
    text = " ".join(str(error).split())[:1000]
    if isinstance(error, (Refused, jinja2.TemplateError)):
        return text
    return f"the chat template failed: {text}"
