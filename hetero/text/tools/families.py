"""How the families of models write tool calls, told by their chat templates."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from hetero.text.tools.gemma import GemmaCall
from hetero.text.tools.parser import Readers, ToolParser, new_call_id, short_call_id
from hetero.text.tools.readers import JsonCalls, NamedCall, Reader
from hetero.text.tools.tagged import QWEN, AnyTagged, Schemas, TaggedCall


@dataclass(frozen=True, slots=True)
class Family:
    """One way to write calls.

    signs       texts of which a template of the family holds all
    openers     what begins a call, or a list of them
    closers, dropped   see ToolParser
    headers     what stands between a name and its arguments
    bare        an answer may be calls alone, without a mark
    ends_thought   marks at which models of the family stop to reason without saying so

    and for calls that are forced ({NAME} stands for the name as JSON, {name} for the name itself):

    begin, end  around all calls        call, after    around the arguments of each
    between     between two calls; None if there is only ever one
    """

    name: str
    signs: tuple[str, ...]
    openers: tuple[str, ...]
    closers: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    bare: bool = False
    ends_thought: tuple[str, ...] = ()
    begin: str = ""
    call: str = ""
    after: str = ""
    between: str | None = ""
    end: str = ""
    new_id: Callable[[], str] = new_call_id

    @property
    def marks(self) -> frozenset[str]:
        """What the parser must see even where it is a control token."""
        return frozenset((*self.openers, *self.closers, *self.dropped, *self.headers))


HARMONY = Family(
    "harmony",
    ("<|channel|>", "<|message|>"),
    (),
    headers=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
    call="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
    between=None,
)
HERMES = Family(
    "hermes",
    ("<tool_call>",),
    ("<tool_call>",),
    ("</tool_call>",),
    call='<tool_call>\n{"name": {NAME}, "arguments": ',
    after="}\n</tool_call>",
    between="\n",
)
GENERIC = Family(
    "generic",
    (),
    ("<tool_call>",),
    ("</tool_call>",),
    bare=True,
    call=HERMES.call,
    after=HERMES.after,
    between="\n",
)
FAMILIES = (
    HARMONY,
    Family(
        "mistral-named",
        ("[TOOL_CALLS]", "[ARGS]"),
        ("[TOOL_CALLS]",),
        headers=("[ARGS]", "[CALL_ID]"),
        call="[TOOL_CALLS]{name}[ARGS]",
        new_id=short_call_id,
    ),
    Family(
        "mistral",
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]",),
        begin="[TOOL_CALLS][",
        call='{"name": {NAME}, "arguments": ',
        after="}",
        between=", ",
        end="]",
        new_id=short_call_id,
    ),
    Family(
        "deepseek",
        ("<｜tool▁call▁begin｜>",),
        ("<｜tool▁call▁begin｜>",),
        ("<｜tool▁call▁end｜>",),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        headers=("<｜tool▁sep｜>",),
        begin="<｜tool▁calls▁begin｜>",
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
    ),
    Family(
        "kimi",
        ("<|tool_call_begin|>",),
        ("<|tool_call_begin|>",),
        ("<|tool_call_end|>",),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        headers=("<|tool_call_argument_begin|>",),
        ends_thought=("<|tool_calls_section_begin|>",),
        begin="<|tool_calls_section_begin|>",
        call="<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
        after="<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
    ),
    Family(
        "cohere",
        ("<|START_ACTION|>",),
        ("<|START_ACTION|>",),
        ("<|END_ACTION|>",),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        begin="<|START_ACTION|>[\n",
        call='    {"tool_call_id": "0", "tool_name": {NAME}, "parameters": ',
        after="}",
        between=",\n",
        end="\n]<|END_ACTION|>",
    ),
    Family(
        "gemma",
        ("<|tool_call>", "<tool_call|>"),
        ("<|tool_call>",),
        ("<tool_call|>",),
        headers=('<|"|>',),
        call="<|tool_call>call:{name}",
        after="<tool_call|>",
    ),
    Family(
        "seed",
        ("<seed:tool_call>",),
        ("<seed:tool_call>",),
        ("</seed:tool_call>",),
        call='<seed:tool_call>\n{"name": {NAME}, "arguments": ',
        after="}\n</seed:tool_call>",
        between="\n",
    ),
    Family(
        "nemotron",
        ("<TOOLCALL>",),
        ("<TOOLCALL>",),
        ("</TOOLCALL>",),
        begin="<TOOLCALL>[",
        call='{"name": {NAME}, "arguments": ',
        after="}",
        between=", ",
        end="]</TOOLCALL>",
    ),
    Family(
        "qwen-coder",
        ("<tool_call>", "<function="),
        ("<tool_call>", "<function="),
        ("</tool_call>",),
        call=HERMES.call,
        after=HERMES.after,
        between="\n",
    ),
    Family(
        "glm",
        ("<tool_call>", "<arg_key>"),
        ("<tool_call>",),
        ("</tool_call>",),
        call=HERMES.call,
        after=HERMES.after,
        between="\n",
    ),
    HERMES,
    Family(
        "listed",
        ("<|tool_call|>",),
        ("<|tool_call|>",),
        ("<|/tool_call|>",),
        begin="<|tool_call|>[",
        call='{"name": {NAME}, "arguments": ',
        after="}",
        between=", ",
        end="]",
    ),
    Family(
        "llama3",
        ('"parameters"', "ipython"),
        ("<|python_tag|>",),
        bare=True,
        call='{"name": {NAME}, "parameters": ',
        after="}",
        between=None,
    ),
)


@functools.lru_cache(maxsize=16)
def family_of(template: str) -> Family:
    """The family whose marks the template's source holds; GENERIC if it holds none, or tells no tools."""
    known = (family for family in FAMILIES if all(sign in template for sign in family.signs))
    family = next(known, GENERIC)
    return family if family is HARMONY or takes_tools(template) else GENERIC


def takes_tools(template: str) -> bool:
    """Whether the template itself looks at `tools`, the variable."""
    from hetero.text.template import variables_of

    return "tools" in variables_of(template)


def tool_parser(family: Family, schemas: Schemas, parallel: bool) -> ToolParser:
    """A parser for every family but HARMONY. `schemas` has the tools' names as keys."""
    readers: Readers = {opener: _reader_of(family, opener, schemas) for opener in family.openers}
    return ToolParser(
        readers,
        closers=family.closers,
        dropped=family.dropped,
        at_start=functools.partial(JsonCalls, frozenset(schemas)) if family.bare else None,
        new_id=family.new_id,
        parallel=parallel,
    )


def _reader_of(family: Family, opener: str, schemas: Schemas) -> Callable[[], Reader]:
    if opener == "<function=":
        return functools.partial(TaggedCall, QWEN, schemas)
    if opener == "<|tool_call>":
        return GemmaCall
    if opener in ("<tool_call>", "<seed:tool_call>"):
        return functools.partial(AnyTagged, schemas)
    if opener == "[TOOL_CALLS]":
        return MistralCalls
    if family.name in ("deepseek", "kimi"):
        return functools.partial(NamedCall, _name_in_marks)
    known: Collection[str] | None = frozenset(schemas) if family.bare else None
    return functools.partial(JsonCalls, known)


class MistralCalls:
    """After [TOOL_CALLS]: a list of calls, or a name, [ARGS] and the arguments."""

    def __init__(self) -> None:
        self.done = self.failed = False
        self._reader: Reader | None = None

    def push(self, text: str):
        if self._reader is None:
            text = text.lstrip()
            if not text:
                return [], ""
            self._reader = (
                JsonCalls() if text[0] in "[{" and not text.startswith("[A") else NamedCall(_name_before_args)
            )
        events, rest = self._reader.push(text)
        self.done, self.failed = self._reader.done, self._reader.failed
        return events, rest

    def finish(self):
        return [] if self._reader is None else self._reader.finish()


def _name_before_args(header: str) -> str:
    """`get_weather[CALL_ID]abc123def[ARGS]`"""
    found = re.fullmatch(r"\s*([^\s\[\]{}<>]+)\s*(\[CALL_ID\][^\[\]]*)?(\[ARGS\])?\s*", header)
    return found.group(1) if found else ""


def _name_in_marks(header: str) -> str:
    """`function<｜tool▁sep｜>get_weather\\n```json\\n`, or with `functions.get_weather:0` before a mark."""
    text = re.sub(r"^\s*function<｜tool▁sep｜>", "", header)
    text = re.split(r"<[｜|]|\n", text.strip(), maxsplit=1)[0]
    found = re.fullmatch(r"(?:functions\.)?([^\s:]+?)(?::\d+)?", text.strip())
    return found.group(1) if found else ""
