"""Answers of every family of models, read in pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.text.parts import (
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
    parser_for,
)
from hetero.text.tools.families import family_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "options": {"type": "object"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {}}},
]
PARIS, NOW = ("get_weather", {"city": "Paris"}), ("now", {})

HERMES = "{% if tools %}<tool_call></tool_call>{% endif %}"
QWEN3 = HERMES + "<think></think>"
CODER = HERMES + "<function="
GLM = HERMES + "<arg_key><think></think>"
LLAMA3 = 'ipython "parameters" tools'
MISTRAL, MISTRAL_NAMED = "[TOOL_CALLS]", "[TOOL_CALLS][ARGS]"
HARMONY = "<|start|><|channel|><|message|>"
DEEPSEEK = "<｜tool▁call▁begin｜></think><think>"
KIMI, COHERE = "<|tool_call_begin|>", "<|START_ACTION|><|END_THINKING|>"
LISTED, GENERIC = "<|tool_call|>", "{{ messages }}"

ANSWERS = {
    "hermes": (
        HERMES,
        'Sure.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        ("Sure.", "", [PARIS, NOW]),
    ),
    "hermes, two objects in one tag": (
        HERMES,
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}\n{"name": "now"}</tool_call>',
        ("", "", [PARIS, NOW]),
    ),
    "hermes, arguments first, as a string": (
        HERMES,
        '<tool_call>{"arguments": "{\\"city\\": \\"Paris\\"}", "name": "get_weather"}</tool_call>',
        ("", "", [PARIS]),
    ),
    "hermes, null arguments": (HERMES, '<tool_call>{"name": "now", "arguments": null}', ("", "", [NOW])),
    "hermes, brackets in strings": (
        HERMES,
        '<tool_call>{"name": "get_weather", "arguments": {"city": "}]\\"</tool_call>\\\\"}}</tool_call>',
        ("", "", [("get_weather", {"city": '}]"</tool_call>\\'})]),
    ),
    "hermes, no call after all": (
        HERMES,
        "A <tool_call> is a tag.\nSee <tool_call>{}</tool_call>!",
        ("A <tool_call> is a tag.\nSee <tool_call>{}</tool_call>!", "", []),
    ),
    "hermes, text behind": (
        HERMES,
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n\nDone. ',
        ("Done.", "", [NOW]),
    ),
    "qwen3": (
        QWEN3,
        '<think>\nThey ask for <tool_call>s.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n'
        "</tool_call>",
        ("", "They ask for <tool_call>s.", [NOW]),
    ),
    "qwen3, empty thoughts": (QWEN3, "<think>\n\n</think>\n\nHi there", ("Hi there", "", [])),
    "qwen-coder": (
        CODER,
        'I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nPa"ris\n\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=units>\nnull\n</parameter>\n"
        '<parameter=options>\n{"a": [1]}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        (
            "I look.",
            "",
            [
                ("get_weather", {"city": 'Pa"ris\n', "days": 3, "units": None, "options": {"a": [1]}}),
                NOW,
            ],
        ),
    ),
    "qwen-coder without its outer tag": (
        CODER,
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        ("", "", [PARIS]),
    ),
    "qwen-coder in JSON": (
        CODER,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        ("", "", [PARIS]),
    ),
    "qwen-coder, a value that is no JSON": (
        CODER,
        "<tool_call><function=get_weather><parameter=days>NaN</parameter><parameter=city></parameter>"
        "</function></tool_call>",
        ("", "", [("get_weather", {"days": "NaN", "city": ""})]),
    ),
    "glm": (
        GLM,
        "\n<think>Weather.</think>\nOne moment<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n"
        "<tool_call>now</tool_call>",
        ("One moment", "Weather.", [("get_weather", {"city": "Paris", "days": 2}), NOW]),
    ),
    "llama3": (LLAMA3, '{"name": "get_weather", "parameters": {"city": "Paris"}}', ("", "", [PARIS])),
    "llama3, several": (
        LLAMA3,
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "now", "parameters": {}}',
        ("", "", [PARIS, NOW]),
    ),
    "llama3, JSON of another kind": (
        LLAMA3,
        '{"name": "Ada", "parameters": [1, 2]} is JSON.',
        ('{"name": "Ada", "parameters": [1, 2]} is JSON.', "", []),
    ),
    "llama3, an answer": (LLAMA3, "``` `x` ```", ("``` `x` ```", "", [])),
    "mistral": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "012345678"}, '
        '{"name": "now", "arguments": {}}]',
        ("", "", [PARIS, NOW]),
    ),
    "mistral, named": (
        MISTRAL_NAMED,
        'So:[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]012345678[ARGS]{}',
        ("So:", "", [PARIS, NOW]),
    ),
    "harmony": (
        HARMONY,
        "<|channel|>analysis<|message|>Weather.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Paris"}<|call|><|start|>assistant to=functions.now'
        "<|channel|>commentary json<|message|><|call|>",
        ("I look.", "Weather.", [PARIS, NOW]),
    ),
    "harmony, an answer": (
        HARMONY,
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>a < b<|return|>",
        ("a < b", "Hm", []),
    ),
    "deepseek": (
        DEEPSEEK,
        "Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("Yes.", "", [PARIS, NOW]),
    ),
    "kimi": (
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        ("", "", [PARIS, NOW]),
    ),
    "cohere": (
        COHERE,
        "<|START_THINKING|>I look.<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        ("", "I look.", [PARIS, NOW]),
    ),
    "cohere, an answer": (COHERE, "<|START_RESPONSE|>Hi.<|END_RESPONSE|>", ("Hi.", "", [])),
    "listed": (
        LISTED,
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>',
        ("", "", [PARIS]),
    ),
    "generic": (
        GENERIC,
        '```json\n{"tool_calls": [{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"type": "function", "function": {"name": "now", "arguments": {}}}]}\n```',
        ("", "", [PARIS, NOW]),
    ),
    "generic, an answer in JSON": (GENERIC, '[{"city": "Paris"}] ok', ('[{"city": "Paris"}] ok', "", [])),
    "generic, in tags": (
        GENERIC,
        'ok <tool_call>{"name": "now", "arguments": {}}</tool_call>',
        ("ok", "", [NOW]),
    ),
}


def read(parser, pieces) -> tuple[str, str, list[tuple[str, object]]]:
    """(text, reasoning, calls) of an answer in pieces, with what every stream of parts must keep to."""
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    text = reasoning = ""
    calls: list[tuple[str, str, str]] = []
    for part in parts:
        if isinstance(part, TextPart):
            text += part.text
            assert part.text
        elif isinstance(part, ReasoningPart):
            reasoning += part.text
            assert part.text
        elif isinstance(part, ToolCallStart):
            assert part.index == len(calls) and part.id not in {call[0] for call in calls} and part.name
            calls.append((part.id, part.name, ""))
        else:
            assert isinstance(part, ToolCallArguments) and part.index == len(calls) - 1 and part.text
            calls[-1] = (*calls[-1][:2], calls[-1][2] + part.text)
    assert parser.called_tools == bool(calls)
    return text, reasoning, [(name, json.loads(arguments)) for _, name, arguments in calls]


def new_parser(template: str, **kwargs):
    tail = {HARMONY: "<|start|>assistant"}.get(template, "<|im_start|>assistant\n")
    return parser_for(template, TOOLS, tail, **kwargs)


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_of_every_family(name):
    template, answer, wanted = ANSWERS[name]
    assert read(new_parser(template), [answer]) == wanted
    assert read(new_parser(template), list(answer)) == wanted


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_it_does_not_matter_how_the_text_is_cut(data):
    template, answer, wanted = ANSWERS[data.draw(st.sampled_from(sorted(ANSWERS)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=12)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    assert read(new_parser(template), pieces) == wanted


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_the_same_in_one_piece_and_in_many(data):
    """Whatever a model writes between the marks: nothing raises, and text never gets lost before a call."""
    template, answer, _ = ANSWERS[data.draw(st.sampled_from(sorted(ANSWERS)))]
    words = ["{", "}", "[", "]", '"', "\\", ",", ":", "\n", " ", "x", "1", "null", '{"name": "now"']
    words += [*sorted(family_of(template).marks), answer[:9], answer[-9:], answer]
    pieces = data.draw(st.lists(st.sampled_from(words), max_size=12))
    whole, cut = [], []
    for out, texts in ((whole, ["".join(pieces)]), (cut, list("".join(pieces)))):
        parser = new_parser(template)
        parts = [part for text in texts for part in parser.push(text)] + parser.finish()
        for kind in (TextPart, ReasoningPart, ToolCallArguments):
            out.append("".join(part.text for part in parts if isinstance(part, kind)))
        out.append([(part.index, part.name) for part in parts if isinstance(part, ToolCallStart)])
    assert whole == cut
