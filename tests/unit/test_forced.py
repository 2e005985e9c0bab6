"""Answers that are made to call tools, or to have a form, with whatever the family writes around them."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from hetero.text.output import MAX_CHARS, OutputError
from hetero.text.parts import ReasoningPart, TextPart, ToolCallArguments, ToolCallStart, parser_for
from hetero.text.tools.families import FAMILIES, GENERIC
from hetero.text.tools.forced import arguments_schemas
from tests.scale import scaled
from tests.schemas import schemas

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {}}}
TEMPLATES = {
    family.name: "{{ tools }}" + " ".join(family.signs) for family in FAMILIES if family.name != "harmony"
}
TEMPLATES[GENERIC.name] = "<tool_call>, but no tools"
HARMONY = "{{ tools }}<|channel|><|message|>"
THINKING = "<think></think>"
TAIL = "<|im_start|>assistant\n"
SCHEMA = {"type": "json_schema", "json_schema": {"schema": PARAMETERS}}


def parts_of(text: str, template: str, tail: str, tools=(WEATHER, NOW)):
    """(text, reasoning, calls) of an answer."""
    parser = parser_for(template, tools, tail)
    parts = [part for char in text for part in parser.push(char)] + parser.finish()
    calls = [[part.name, ""] for part in parts if isinstance(part, ToolCallStart)]
    for part in parts:
        if isinstance(part, ToolCallArguments):
            calls[part.index][1] += part.text
    said = (
        "".join(part.text for part in parts if isinstance(part, kind)) for kind in (TextPart, ReasoningPart)
    )
    return *said, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_family_writes_forced_calls_that_its_parser_reads(writer, compiler, name):
    template, tail = TEMPLATES[name], "<think></think>"  # thinking is over
    counts = set()
    for seed, several in ((0, False), (1, True), (2, True)):
        grammar = compiler.compile(
            None, tools=[WEATHER, NOW], several=several, template=template, prompt_tail=tail
        )
        ids, complete = writer.write(grammar, seed, limit=600)
        text, reasoning, calls = parts_of(writer.tokenizer.decode(ids), template, tail)
        assert complete and (text, reasoning) == ("", "")
        assert calls and (several or len(calls) == 1)
        counts.add(len(calls))
        for called, arguments in calls:
            jsonschema.validate(arguments, {"now": {"maxProperties": 0}, "get_weather": PARAMETERS}[called])


def test_one_call_for_one_tool(writer, compiler):
    only_paris = {**PARAMETERS, "properties": {"city": {"enum": ["Paris"]}}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": only_paris}}
    grammar = compiler.compile(None, tools=[tool], several=False)
    ids, complete = writer.write(grammar, 0)
    text = writer.tokenizer.decode(ids)
    assert complete and re.fullmatch(
        r'<tool_call>\n\{"name": "get_weather", "arguments": \{\s*"city"\s*:\s*"Paris"\s*\}\}\n</tool_call>',
        text,
    )


def test_calls_or_an_output(writer, compiler):
    seen = set()
    for seed in range(12):
        grammar = compiler.compile({"type": "choice", "choice": ["yes", "no"]}, tools=[NOW])
        ids, complete = writer.write(grammar, seed, limit=400)
        text, _, calls = parts_of(writer.tokenizer.decode(ids), "", TAIL)
        assert complete and bool(calls) != (text in ("yes", "no"))
        seen.add(bool(calls))
    assert seen == {True, False}


@pytest.mark.parametrize("tail", [TAIL, TAIL + "<think>\n", TAIL + "<think>\n\n</think>\n\n"])
def test_reasoning_comes_before_the_form(writer, compiler, tail):
    """Tags that are plain text in this vocabulary; the model reasons where it has begun to or may begin."""
    grammar = compiler.compile(SCHEMA, template=THINKING, prompt_tail=tail)
    end = "</think>\n" if tail.endswith("<think>\n") else "<think>hm</think>\n"
    may_think = not tail.endswith("</think>\n\n")
    for token_id in writer.tokenizer.encode(end, parse_special=False, add_special=False):
        if not grammar.accept(token_id):
            assert not may_think
            break
    else:
        assert may_think
        ids, complete = writer.write(grammar, 0)
        text, reasoning, _ = parts_of(end + writer.tokenizer.decode(ids), THINKING, tail, ())
        assert complete and reasoning == ("" if tail.endswith("<think>\n") else "hm")
        jsonschema.validate(json.loads(text), PARAMETERS)
    (brace,) = writer.tokenizer.encode("{", parse_special=False, add_special=False)
    assert compiler.compile(SCHEMA, template=THINKING, prompt_tail=tail).accept(brace)


def test_reasoning_between_control_tokens(writer, compiler, monkeypatch):
    """Tags that are tokens of their own, which no text can write: the form begins right behind them."""
    control = writer.tokenizer.control_texts
    monkeypatch.setattr("hetero.text.reasoning.TAGS", (("<jupyter_start>", "<jupyter_code>"),))
    template = "<jupyter_code>"
    close, end = control["<jupyter_code>"], control["<|im_end|>"]
    grammar = compiler.compile(SCHEMA, template=template, prompt_tail="<jupyter_start>")
    for token_id in writer.tokenizer.encode("I think {so", parse_special=False, add_special=False):
        assert grammar.accept(token_id)
    assert not grammar.fork().accept(end)
    in_letters = writer.tokenizer.encode("<jupyter_code>", parse_special=False, add_special=False)
    tried = grammar.fork()
    assert not all(map(tried.accept, in_letters))  # who reads the text would take it for the token
    assert grammar.accept(close)
    ids, complete = writer.write(grammar, 0)
    assert complete
    jsonschema.validate(json.loads(writer.tokenizer.decode(ids)), PARAMETERS)


def test_harmony_has_headers(writer, compiler):
    for output, tools, start in (
        (SCHEMA, (), "<|channel|>final<|message|>"),
        (None, [NOW], "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"),
    ):
        grammar = compiler.compile(output, tools=tools, template=HARMONY, prompt_tail="<|start|>assistant")
        think = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        for token_id in writer.tokenizer.encode(think + start, parse_special=False, add_special=False):
            assert grammar.accept(token_id)
        ids, complete = writer.write(grammar, 0)
        answer = think + start + writer.tokenizer.decode(ids)
        text, reasoning, calls = parts_of(answer, HARMONY, "<|start|>assistant", tools)
        assert complete and reasoning == "hm" and calls == [("now", {})] * bool(tools)
        assert tools or jsonschema.validate(json.loads(text), PARAMETERS) is None


@pytest.mark.parametrize(
    "output, pattern",
    [
        ({"type": "regex", "regex": r"[a-c]{2}/\d"}, r"[a-c]{2}/\d"),
        ({"type": "choice", "choice": ['x "y"\n', "😸\\d", "a/b"]}, 'x "y"\n|😸\\\\d|a/b'),
        ({"type": "grammar", "grammar": 'root ::= "a" [0-9]{2} | item\nitem ::= "b" item?'}, r"a[0-9]{2}|b+"),
        ({"type": "grammar", "grammar": 'start: "a" B | "c"\nB: /[x-z]{1,3}/'}, "a[x-z]{1,3}|c"),
        ({"type": "json_object", "schema": {"const": {"a": 1}}}, r'\{\s*"a"\s*:\s*1\s*\}'),
    ],
)
def test_forms_of_other_kinds(writer, compiler, output, pattern):
    for seed in range(6):
        ids, complete = writer.write(compiler.compile(output), seed, limit=60)
        assert complete and re.fullmatch(pattern, writer.tokenizer.decode(ids))


@pytest.mark.parametrize(
    "output, words",
    [
        ({"type": "regex", "regex": "("}, "regex"),
        ({"type": "regex", "regex": ""}, "empty"),
        ({"type": "regex", "regex": "(?=a)b", "field": "guided_regex"}, "guided_regex"),
        ({"type": "choice", "choice": []}, "array of 1 to"),
        ({"type": "choice", "choice": ["a", ""]}, "not empty"),
        ({"type": "grammar", "grammar": "root ::= (", "field": "grammar"}, "grammar: "),
        ({"type": "grammar", "grammar": "root ::= unknown"}, "unknown"),
        ({"type": "grammar", "grammar": "start: unknown"}, "unknown"),
        ({"type": "grammar", "grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "deep"),
        ({"type": "grammar", "grammar": "#" * MAX_CHARS + "\n"}, "characters"),
        ({"type": "json_object", "schema": {"minProperties": 2}}, "minProperties"),
        ({"type": "json_object", "schema": {"properties": {"a": {"minProperties": 2}}}}, "minProperties"),
    ],
)
def test_what_cannot_be_enforced_is_refused(compiler, output, words):
    with pytest.raises(OutputError) as error:
        compiler.compile(output)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert error.value.field == output.get("field", "response_format")


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": "object", "properties": {}},
        {"properties": {"a": {"type": "string", "not": {"const": "x"}}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": r"\d+(?!x)"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "b", "format": "custom"}}},
        {"type": "object", "properties": {"pattern": {"type": "string"}, "not": {}}, "required": ["pattern"]},
        {"type": "object", "properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
        {"type": "object", "properties": {"a": {"$ref": "https://example.com/schema"}}},
        {"type": "array", "items": {"type": "string"}},
        {"type": "object", "properties": {"a": {"type": "nonsense"}}},
        {"x-guidance": {"whitespace_pattern": "x"}, "type": "object"},
        {"type": "object", "description": "x" * MAX_CHARS, "properties": {"a": {"type": "integer"}}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "if": {"required": ["a"]}, "then": False},
    ],
    ids=lambda parameters: str(parameters)[:80],
)
def test_schemas_of_tools_are_relaxed(writer, compiler, parameters):
    """What a grammar cannot check is left to the tool; the arguments are an object whatever happens."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    ids, complete = writer.write(compiler.compile(None, tools=[tool], several=False), 1, limit=200)
    _, _, calls = parts_of(writer.tokenizer.decode(ids), "", TAIL, [tool])
    if complete:
        ((name, arguments),) = calls
        assert name == "f" and isinstance(arguments, dict)
        assert arguments.keys() >= set(parameters.get("required", ()))


def test_names_of_properties_are_no_keywords():
    parameters = {"properties": {"not": {"pattern": "x", "enum": [{"not": 1}]}}, "not": {}}
    assert arguments_schemas(parameters)[2]["properties"] == {"not": {"enum": [{"not": 1}]}}


def test_schemas_at_random(writer, compiler):
    """The answer validates, or the schema is refused: nothing in between."""
    valid = [0]

    @given(schemas())
    @settings(
        max_examples=scaled(80, 1000), deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), derandomize=True,
    )  # fmt: skip
    def check(schema):
        try:
            grammar = compiler.compile({"type": "json_schema", "json_schema": {"schema": schema}})
        except OutputError as error:
            assert "\n" not in str(error)
            return
        ids, complete = writer.write(grammar, 0, limit=80)
        if complete:
            answer = json.loads(writer.tokenizer.decode(ids))
            checker = jsonschema.FormatChecker()
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(answer)
            valid[0] += 1

    check()
    assert valid[0] > scaled(30, 400)


def test_what_all_tools_may_hold_in_all(compiler):
    parameters = {"type": "object", "description": "x" * 1000}
    tools = [
        {"type": "function", "function": {"name": f"t{i}", "parameters": parameters}} for i in range(1100)
    ]
    with pytest.raises(OutputError, match="tools: their schemas have more than 1048576 characters") as error:
        compiler.compile(None, tools=tools)
    assert error.value.field == "tools"
