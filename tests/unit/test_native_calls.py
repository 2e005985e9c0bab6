"""Forced calls in tags and in Gemma's form: what the grammar allows, the parser takes as valid."""

from __future__ import annotations

import json
import re
import time

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hetero.text.parts import ToolCallArguments, ToolCallStart, parser_for
from hetero.text.tools.families import family_of
from hetero.text.tools.forced import arguments_schemas, own_form
from hetero.text.tools.lark import Inexpressible
from hetero.text.tools.strings import string_forms
from hetero.text.tools.types import json_of
from tests.scale import scaled
from tests.schemas import schemas

TEMPLATES = {
    "qwen-coder": "{{ tools }}<tool_call><function=",
    "glm": "{{ tools }}<tool_call><arg_key>",
    "seed": "{{ tools }}<seed:tool_call>",
    "gemma": "{{ tools }}<|tool_call><tool_call|>",
}
CLOSINGS = {
    "qwen-coder": ("\n<tool_call>", "\n</parameter>", "</parameter>", '"', "]", "}"),
    "glm": ("\n<tool_call>", "</arg_value>", '"', "]", "}"),
    "seed": ("\n<seed:tool_call>", "</parameter>", '"', "]", "}"),
    "gemma": ("<|tool_call>", '<|"|>', '"', "]", "}"),
}
EDIT = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "minLength": 2, "description": "of the file"},
        "mode": {"$ref": "#/$defs/Mode"},
        "line": {"type": "integer", "minimum": 1},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "lines": {
            "type": "array",
            "items": {"type": "string", "maxLength": 12},
            "minItems": 1,
            "maxItems": 3,
        },
        "where": {"type": "object", "properties": {"a b": {"type": "boolean"}}, "required": ["a b"]},
    },
    "required": ["path", "mode"],
    "$defs": {"Mode": {"type": "string", "enum": ["read", "<write>"]}},
}
FREE = {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1}
WRITTEN = {
    "qwen-coder": (
        "<tool_call>\n<function=edit>\n<parameter=path>\n\n</b>\n\n</parameter>\n<parameter=mode>\n<write>\n"
        '</parameter>\n<parameter=lines>\n["</parameter>"]\n</parameter>\n</function>\n</tool_call>',
        {"path": "\n</b>\n", "mode": "<write>", "lines": ["</parameter>"]},
    ),
    "glm": (
        "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>\n</b></arg_value>\n<arg_key>mode</arg_key>\n"
        "<arg_value>read</arg_value>\n<arg_key>note</arg_key>\n<arg_value>it's \"so\"</arg_value>\n"
        "</tool_call>",
        {"path": "\n</b>", "mode": "read", "note": 'it\'s "so"'},
    ),
    "glm, closely": (
        "<tool_call>edit<arg_key>path</arg_key><arg_value>ab</arg_value><arg_key>mode</arg_key><arg_value>read"
        '</arg_value><arg_key>lines</arg_key><arg_value>["</arg_val"]</arg_value></tool_call>',
        {"path": "ab", "mode": "read", "lines": ["</arg_val"]},
    ),
    "seed": (
        "<seed:tool_call>\n<function=edit>\n<parameter=path>x\ny</parameter>\n<parameter=mode>read</parameter>\n"
        "<parameter=line>7</parameter>\n</function>\n</seed:tool_call>",
        {"path": "x\ny", "mode": "read", "line": 7},
    ),
    "gemma": (
        '<|tool_call>call:edit{line:12,lines:[<|"|>{"<|"|>,<|"|><|<|"|>],mode:<|"|><write><|"|>,note:null,'
        'path:<|"|>C:\\new "x"<|"|>,where:{"a b":true}}<tool_call|>',
        {
            "line": 12, "lines": ['{"', "<|"], "mode": "<write>", "note": None, "path": 'C:\\new "x"',
            "where": {"a b": True},
        },
    ),
}  # fmt: skip


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def calls_in(text, template, tools, size=1):
    parser = parser_for(template, tools, "")
    parts = [part for at in range(0, len(text), size) for part in parser.push(text[at : at + size])]
    parts += parser.finish()
    calls = [[part.name, ""] for part in parts if isinstance(part, ToolCallStart)]
    for part in parts:
        if isinstance(part, ToolCallArguments):
            calls[part.index][1] += part.text
        else:
            assert isinstance(part, ToolCallStart), part
    return [(name, json.loads(arguments)) for name, arguments in calls]


def accepts(writer, grammar, text):
    ids = writer.tokenizer.encode(text, parse_special=False, add_special=False)
    if not all(not grammar.is_finished and grammar.accept(token_id) for token_id in ids):
        return False
    return grammar.is_finished or grammar.accept(min(writer.tokenizer.eog_ids))


def forced(compiler, name, tools, several=False):
    return compiler.compile(None, tools=tools, several=several, template=TEMPLATES[name])


@pytest.mark.parametrize("case", WRITTEN)
def test_calls_as_the_family_writes_them(writer, compiler, case):
    text, arguments = WRITTEN[case]
    name = case.partition(",")[0]
    edit = tool("edit", EDIT)
    assert family_of(TEMPLATES[name]).name == name
    assert accepts(writer, forced(compiler, name, [edit]), text)
    for size in (1, 7, len(text)):
        assert calls_in(text, TEMPLATES[name], [edit], size) == [("edit", arguments)]
    jsonschema.validate(arguments, EDIT)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_schema_forbids_cannot_be_written(writer, compiler, name):
    text, _ = WRITTEN[name]
    edit = tool("edit", EDIT)
    path = {"qwen-coder": "\n\n</b>\n\n", "glm": "\n</b>", "seed": "x\ny", "gemma": 'C:\\new "x"'}[name]
    mode = "<write>" if "<write>" in text else "read"
    end = {"glm": "</arg_value>", "gemma": '<|"|>'}.get(name, "</parameter>")
    for wrong in (
        text.replace(path, path.replace(path.strip(), "x")[: 3 if name == "qwen-coder" else 1]),  # too short
        text.replace(f"{mode}{end}", f"append{end}").replace(f"{mode}\n{end}", f"append\n{end}"),
        text.replace("edit", "exit"),
        text.replace("path", "pact"),
        text + "x",
        text.replace(path, path + end),
    ):
        assert wrong != text
        assert not accepts(writer, forced(compiler, name, [edit]), wrong)
    in_json = '<tool_call>\n{"name": "edit", "arguments": {"path": "ab", "mode": "read"}}\n</tool_call>'
    assert not accepts(writer, forced(compiler, name, [edit]), in_json)


@pytest.mark.parametrize("name", TEMPLATES)
def test_random_calls_follow_the_schema(writer, compiler, name):
    tools = [tool("edit", EDIT), tool("now", {}), tool("free", FREE)]
    checks = {"edit": EDIT, "now": {"maxProperties": 0}, "free": FREE}
    seen = set()
    for seed in range(scaled(5, 200)):
        grammar = forced(compiler, name, tools, several=seed % 2 == 1)
        ids, complete = writer.write(grammar, seed, limit=400, closings=CLOSINGS[name])
        if not complete:
            continue
        calls = calls_in(writer.tokenizer.decode(ids), TEMPLATES[name], tools)
        assert calls and (seed % 2 or len(calls) == 1)
        for called, arguments in calls:
            jsonschema.validate(arguments, checks[called])
            seen.add(called)
    assert seen


@pytest.mark.parametrize("name", TEMPLATES)
def test_several_calls(writer, compiler, name):
    text, arguments = WRITTEN[name]
    twice = text + ("" if name == "gemma" else "\n") + text
    edit = tool("edit", EDIT)
    assert accepts(writer, forced(compiler, name, [edit], several=True), twice)
    assert not accepts(writer, forced(compiler, name, [edit]), twice)
    assert calls_in(twice, TEMPLATES[name], [edit]) == [("edit", arguments)] * 2


@pytest.mark.parametrize("name", TEMPLATES)
def test_schemas_at_random(writer, compiler, name):
    """In the own form or in JSON, but always what the schema says, or what its relaxation leaves of it."""
    valid, own = [0], [0]
    template = TEMPLATES[name]
    properties = st.dictionaries(st.sampled_from(["a", "b", "größe", "x y", 'q"']), schemas(), max_size=3)

    @given(properties, st.sets(st.sampled_from(["a", "b"])), st.integers(0, 99))
    @settings(
        max_examples=scaled(14, 1000), deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), derandomize=True,
    )  # fmt: skip
    def check(given_properties, required, seed):
        parameters = {
            "type": "object",
            "properties": given_properties,
            "required": sorted(required & given_properties.keys()),
        }
        tools = [tool("f", parameters)]
        grammar = forced(compiler, name, tools)
        ids, complete = writer.write(grammar, seed, limit=120, closings=CLOSINGS[name])
        if not complete:
            return
        text = writer.tokenizer.decode(ids)
        ((called, arguments),) = calls_in(text, template, tools)
        relaxed = compiler._relaxed[json.dumps(parameters)]
        assert called == "f" and isinstance(arguments, dict)
        assert relaxed == 4 or arguments.keys() >= set(parameters["required"])  # 4: nothing satisfies it
        valid[0] += 1
        own[0] += '"arguments"' not in text
        if relaxed == 0:
            checker = jsonschema.FormatChecker()
            jsonschema.Draft202012Validator(parameters, format_checker=checker).validate(arguments)

    check()
    assert valid[0] > scaled(5, 400) and own[0] > valid[0] // 4


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object"} | {"additionalProperties": {"type": "integer"}},
        {"type": "object", "properties": {"a": {"type": "string"}}, "minProperties": 1},
        {"type": "object", "anyOf": [{"required": ["a"]}], "properties": {"a": {"type": "string"}}},
    ],
    ids=["names of all sorts", "a count", "a union"],
)
def test_what_tags_cannot_say_is_forced_as_json(writer, compiler, name, parameters):
    for _ in range(2):
        ids, _ = writer.write(forced(compiler, name, [tool("f", parameters)]), 1, limit=24)
        start = writer.tokenizer.decode(ids)
        assert '{"name": "f", "arg' in start or start.startswith("<|tool_call>call:f{")
    assert own_form(TEMPLATES[name], "f", arguments_schemas(parameters)[0], lambda mark: None) is None


def test_marks_that_are_tokens(writer, compiler, monkeypatch):
    """A value ends with the closing tag's token, and cannot hold the tag's text."""
    control = writer.tokenizer.control_texts
    close = control["<jupyter_code>"]
    encode = writer.tokenizer.encode
    monkeypatch.setattr(compiler, "_mark_token", lambda mark: close if mark == "</parameter>" else None)
    grammar = forced(compiler, "qwen-coder", [tool("f", {"properties": {"a": {"type": "string"}}})])
    start = "<tool_call>\n<function=f>\n<parameter=a>\nfirst </parameter"
    assert all(map(grammar.accept, encode(start, parse_special=False, add_special=False)))
    assert not grammar.fork().accept(encode(">", parse_special=False, add_special=False)[0])
    assert not grammar.fork().accept(close)
    assert all(map(grammar.accept, (*encode("\n", parse_special=False, add_special=False), close)))
    assert accepts(writer, grammar, "\n</function>\n</tool_call>")


@pytest.mark.parametrize(
    "pattern, yes, no",
    [
        ("^[A-Z]{2}$", ["AB"], ["ABC", "ab", "A\n"]),
        ("a/b", ["xa/b\n", "a/b"], ["a b"]),
        (r"^a\/b", ["a/bc"], ["xa/b"]),
        ("x|y$", None, None),
        ("^(x|y)$", ["x"], ["xy"]),
        ("[$^|]", ["a$"], ["a"]),
        ("a[b[c]", None, None),
        ("a^b", None, None),
        ("(?=a)", None, None),
        (r"\$$", ["a$"], ["$a"]),
    ],
)
def test_patterns(writer, compiler, pattern, yes, no):
    """A pattern means what it means in JSON; what cannot be said so is left to JSON."""
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": pattern}},
        "required": ["a"],
    }
    text = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    grammar = forced(compiler, "qwen-coder", [tool("f", parameters)])
    if yes is None:  # relaxed, as in JSON, or in JSON
        in_json = '<tool_call>\n{"name": "f", "arguments": {"a": "xa"}}\n</tool_call>'
        assert accepts(writer, grammar.fork(), in_json) != accepts(writer, grammar.fork(), text.format("xa"))
        return
    for value in yes:
        assert accepts(writer, grammar.fork(), text.format(value)), value
    for value in no:
        assert not accepts(writer, grammar.fork(), text.format(value)), value


def test_formats():
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    good = {
        "date": ["2024-02-29", "1999-12-31"], "date-time": ["2024-01-31T23:59:59Z"],
        "time": ["01:02:03.5+01:00"],
        "email": ["a.b+c@x-y.org"], "ipv4": ["255.0.19.100"], "hostname": ["a.b-c.d"],
        "uuid": ["123e4567-e89b-12d3-a456-426614174000"], "uri": ["https://x.org/a?b=%20#c", "mailto:a@b.c"],
    }  # fmt: skip
    bad = {"date": "2024-13-01", "ipv4": "256.1.1.1", "email": "a b@c", "uri": "no uri", "uuid": "12"}
    for name, texts in good.items():
        (form,) = string_forms({"type": "string", "format": name}, False)
        regex = form[1:-1].replace(r"\/", "/")
        for text in texts:
            assert re.fullmatch(regex, text), name
            checker.check(text, name)
        assert name not in bad or not re.fullmatch(regex, bad[name])
    assert string_forms({"format": "custom"}, True) == string_forms({}, False)
    for schema, lenient in (
        ({"format": "custom"}, False),
        ({"format": "ipv6"}, True),
        ({"minLength": "1"}, False),
        ({"minLength": 3, "maxLength": 2}, False),
        ({"maxLength": 1, "pattern": "aa"}, False),
    ):
        with pytest.raises(Inexpressible):
            string_forms(schema, lenient)


@pytest.mark.parametrize("name", TEMPLATES)
def test_large_schemas_take_their_time_and_no_more(writer, compiler, name):
    """Definitions that refer to each other doubly, wide unions, long enumerations, many tools."""
    doubly = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 9} for i in range(40)}
    doubly["d40"] = {"type": "string"}
    nested: dict = {"type": "string"}
    for _ in range(60):
        nested = {"type": "object", "properties": {"a": nested, "b": {"type": ["string", "null"]}}}
    hard = [
        {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": doubly},
        {"properties": {"a": {"enum": [f"value {i}" for i in range(3000)]}}},
        {"properties": {"a": nested}},
        {"properties": {f"p{i}": {"type": "string", "maxLength": 10_000} for i in range(300)}},
        {"properties": {"a": {"type": "string", "pattern": "^(a?){200}a{200}$", "maxLength": 300}}},
        {"properties": {"a": {"$ref": "#/$defs/r"}}, "$defs": {"r": {"anyOf": [{"$ref": "#/$defs/r"}]}}},
    ]
    started = time.perf_counter()
    for parameters in hard:
        forced(compiler, name, [tool("f", {"type": "object", **parameters})])
    many = [tool(f"t{i}", EDIT) for i in range(60)]
    ids, _ = writer.write(forced(compiler, name, many, several=True), 0, limit=10)
    assert len(ids) == 10
    assert time.perf_counter() - started < 60


def test_numbers_keep_their_digits():
    """And one that is too large for Python is a number all the same."""
    assert json_of(" 1e999\n", frozenset({"number"})) == "1e999"
    assert json_of("9" * 5000, frozenset({"integer"})) == "9" * 5000
    assert json_of("1.50", frozenset({"number", "string"})) == "1.50"
    assert json_of("1e999", frozenset({"string"})) == '"1e999"'
    assert json_of("[" * 50_000, frozenset({"array"})) == json.dumps("[" * 50_000)
