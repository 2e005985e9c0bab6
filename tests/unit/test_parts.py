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
    capabilities,
    marks_of,
    parser_for,
)
from hetero.text.tools.families import family_of
from hetero.text.tools.scan import MAX_BLANKS

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

HERMES = "{{ tools }}<tool_call></tool_call>"
QWEN3 = HERMES + "<think></think>"
CODER = HERMES + "<function="
GLM = HERMES + "<arg_key><think></think>"
LLAMA3 = '{{ tools }} ipython "parameters"'
MISTRAL, MISTRAL_NAMED = "{{ tools }}[TOOL_CALLS]", "{{ tools }}[TOOL_CALLS][ARGS]"
HARMONY = "{{ tools }}<|start|><|channel|><|message|>"
DEEPSEEK = "{{ tools }}<｜tool▁call▁begin｜></think><think>"
KIMI, COHERE = "{{ tools }}<|tool_call_begin|>", "{{ tools }}<|START_ACTION|><|END_THINKING|>"
LISTED, NEMOTRON = "{{ tools }}<|tool_call|>", "{{ tools }}<TOOLCALL>"
GEMMA = "{{ tools }}<|tool_call><tool_call|><channel|>"
SEED = "{{ tools }}<seed:tool_call></seed:think>"
GENERIC = "{{ messages[0]['tools'] }}<tool_call>"

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
    "hermes, a bracket missing": (
        HERMES,
        '<tool_call>{"name": "now", "arguments": {}</tool_call>\n<tool_call>{"name": "now"</tool_call>',
        ("", "", [NOW, NOW]),
    ),
    "hermes, brackets missing in the arguments": (
        HERMES,
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "options": {"a": [1</tool_call>ok',
        ("ok", "", [("get_weather", {"city": "Paris", "options": {"a": [1]}})]),
    ),
    "hermes, a bracket too many": (
        HERMES,
        '<tool_call>{"name": "now", "arguments": {}}}</tool_call>\nok',
        ("ok", "", [NOW]),
    ),
    "hermes, code behind": (
        HERMES,
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n`x` or\n```\ny\n```',
        ("`x` or\n```\ny\n```", "", [NOW]),
    ),
    "hermes, line breaks in strings": (
        HERMES,
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a\n\tb\\\nc\\\\"}}</tool_call>',
        ("", "", [("get_weather", {"city": "a\n\tb\nc\\"})]),
    ),
    "generic, fenced": (GENERIC, '```json\n{"name": "now", "arguments": {}}\n```\nok', ("ok", "", [NOW])),
    "qwen-coder, other types": (
        CODER,
        '<tool_call><function=get_weather><parameter=days>"5"</parameter><parameter=options>'
        "{'a': [True, None, 'x\\d']}</parameter></function></tool_call>"
        "<tool_call><function=get_weather><parameter=days>5.0</parameter><parameter=units>1e999</parameter>"
        "</function></tool_call>",
        (
            "",
            "",
            [
                ("get_weather", {"days": 5, "options": {"a": [True, None, "x\\d"]}}),
                ("get_weather", {"days": 5, "units": "1e999"}),
            ],
        ),
    ),
    "qwen-coder, a closing tag in JSON": (
        CODER,
        '<tool_call><function=get_weather><parameter=options>{"a": "</parameter></function>"}</parameter>'
        "</function></tool_call>",
        ("", "", [("get_weather", {"options": {"a": "</parameter></function>"}})]),
    ),
    "qwen-coder, a closing tag behind a quote": (
        CODER,
        '<tool_call><function=get_weather>\n<parameter=options>{"a": "b</parameter>\n'
        '<parameter=units>"c</parameter>\n<parameter=city>x</parameter></function></tool_call>ok',
        ("ok", "", [("get_weather", {"options": '{"a": "b', "units": '"c', "city": "x"})]),
    ),
    "glm, a closing tag behind a quote, to the end": (
        GLM,
        '<think></think><tool_call>get_weather<arg_key>options</arg_key><arg_value>["b</arg_value>'
        "<arg_key>city</arg_key><arg_value>x</arg_value></tool_call>",
        ("", "", [("get_weather", {"options": '["b', "city": "x"})]),
    ),
    "kimi, thoughts that do not end": (
        KIMI + "<think></think>",
        "<think>hm<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>"
        "{}<|tool_call_end|><|tool_calls_section_end|>",
        ("", "hm", [NOW]),
    ),
    "gemma, marks in JSON's strings": (
        GEMMA,
        '<|tool_call>call:get_weather{"city":"<|x\n<|\\"|>",days:3}<tool_call|>',
        ("", "", [("get_weather", {"city": '<|x\n<|"|>', "days": 3})]),
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
    "gemma": (
        GEMMA,
        '<|channel>thought\nHm.\n<channel|>Ok.<|tool_call>call:get_weather{city:<|"|>"Pa"<r\n<|"|>,days:-2.5e1,'
        'units:null,options:{<|"|>a b<|"|>:[1,true,x y],"c":"}\\"<|"}}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        (
            "Ok.",
            "Hm.",
            [
                (
                    "get_weather",
                    {
                        "city": '"Pa"<r\n',
                        "days": -25.0,
                        "units": None,
                        "options": {"a b": [1, True, "x y"], "c": '}"<|'},
                    },
                ),
                NOW,
            ],
        ),
    ),
    "seed": (
        SEED,
        "<seed:think>Hm.</seed:think>\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "</function>\n</seed:tool_call>",
        ("", "Hm.", [PARIS]),
    ),
    "nemotron": (
        NEMOTRON,
        '<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>',
        ("", "", [NOW]),
    ),
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
    parts = []
    for piece in pieces:
        parts += parser.push(piece)
        parser.check_invariants()
    parts += parser.finish()
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
        parts = []
        for text in texts:
            parts += parser.push(text)
            parser.check_invariants()
        parts += parser.finish()
        for kind in (TextPart, ReasoningPart, ToolCallArguments):
            out.append("".join(part.text for part in parts if isinstance(part, kind)))
        out.append([(part.index, part.name) for part in parts if isinstance(part, ToolCallStart)])
    assert whole == cut


def test_parts_come_as_early_as_they_are_certain():
    parser = new_parser(HERMES)
    assert parser.push("Let me ") == [TextPart("Let me")]
    assert parser.push("look <") == [TextPart(" look")]  # may be the end of a tag
    assert parser.push("b>. ") == [TextPart(" <b>.")]
    assert parser.push('<tool_call>{"name": "get_weather"') != [] and parser.called_tools
    assert parser.push(', "arguments": {"city": "Pa') == [ToolCallArguments(0, '{"city": "Pa')]
    parser = new_parser(CODER)
    parser.push("<tool_call><function=get_weather><parameter=city>")
    assert parser.push("\nParis\n") == [ToolCallArguments(0, '"Paris')]  # this line break may be the tag's
    parser = new_parser(QWEN3)
    assert parser.push("<think>\nA ") == [ReasoningPart("A")] and parser.push("b</thi") == [
        ReasoningPart(" b")
    ]


def test_only_the_first_call_counts_when_calls_may_not_be_parallel():
    template, answer, (text, reasoning, calls) = ANSWERS["hermes"]
    assert read(new_parser(template, parallel=False), [answer]) == (text, reasoning, calls[:1])


def test_reasoning_that_the_prompt_has_begun():
    for tail, wanted in (
        ("assistant\n<think>\n", ("no </b>", "So it is", [])),
        ("assistant\n<think>\n\n</think>\n\n", ("So it is </think> no </b>", "", [])),
        ("what is <think>?<|im_end|>assistant\n", ("So it is </think> no </b>", "", [])),
    ):
        assert read(parser_for(QWEN3, [], tail), ["So it is </think> no </b>"]) == wanted
    assert read(parser_for(QWEN3, [], "<think>"), ["cut off "]) == ("", "cut off", [])
    tail = "<|start|>assistant<|channel|>final<|message|>The"
    assert read(parser_for(HARMONY, [], tail), [" end<|return|>"]) == ("end", "", [])


def test_without_tools_nothing_is_a_call():
    answer = ANSWERS["hermes"][1] + " "
    parser = parser_for(HERMES, [], "assistant\n")
    assert [part for char in answer for part in parser.push(char)] == list(map(TextPart, answer))
    assert parser.push("") == parser.finish() == [] and not parser.called_tools


def test_mistral_wants_short_ids():
    template, answer, _ = ANSWERS["mistral"]
    starts = [part for part in new_parser(template).push(answer) if isinstance(part, ToolCallStart)]
    assert all(len(part.id) == 9 and part.id.isalnum() for part in starts)


def test_a_long_answer_takes_linear_time():
    """What looks like the beginning of a call, over and over, and a large argument in small pieces."""
    assert read(new_parser(HERMES), ["<tool_call>{" * 3000])[2] == []
    value = "x\\n" * 60_000
    call = f'<tool_call>{{"name": "get_weather", "arguments": {{"city": "{value}"}}}}</tool_call>'
    pieces = [call[at : at + 4] for at in range(0, len(call), 4)]
    assert read(new_parser(HERMES), pieces)[2] == [("get_weather", {"city": json.loads(f'"{value}"')})]


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_blanks_without_end_are_read_the_same_however_they_are_cut(data):
    template, answer, _ = ANSWERS[data.draw(st.sampled_from(sorted(ANSWERS)))]
    words = [" " * 700, "\n" * (MAX_BLANKS + 1), "```", "json", "\n", "x", "{", '{"name": "now"}']
    words += [*sorted(family_of(template).marks), answer[:9], answer]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = []
    for cut in ([text], pieces):
        parser, parts = new_parser(template), []
        for piece in cut:
            parts += parser.push(piece)
            parser.check_invariants()
        parts += parser.finish()
        kinds = (TextPart, ReasoningPart, ToolCallArguments)
        joined = ["".join(part.text for part in parts if isinstance(part, kind)) for kind in kinds]
        found.append((joined, [part.name for part in parts if isinstance(part, ToolCallStart)]))
    assert found[0] == found[1]


@pytest.mark.parametrize("template", [HERMES, GENERIC, QWEN3, CODER])
def test_blanks_stream_when_there_are_very_many(template):
    """Half a megabyte of them: all but the last are said, and a call is still found."""
    blanks, call = " \n" * (1 << 18), '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    if template is CODER:
        call = "<tool_call><function=now></function></tool_call>"
    pieces = [blanks[at : at + 64] for at in range(0, len(blanks), 64)]
    for first in ("x", ""):
        parser = new_parser(template)
        parts = [*parser.push(first), *(part for piece in pieces for part in parser.push(piece))]
        said = "".join(part.text for part in parts)
        parser.check_invariants()
        assert first + blanks == said + "".join(part.text for part in parser.finish())
        assert len(said) >= len(blanks) - MAX_BLANKS
    wanted = ("x" + blanks[:-MAX_BLANKS], "", [NOW])
    assert read(new_parser(template), ["x", *pieces, call]) == wanted
    behind = read(new_parser(template), [call, *pieces, call])
    assert behind[2] == [NOW, NOW] and not behind[0].strip()


@pytest.mark.parametrize(
    "template, wanted",
    [
        (None, ("completion",)),
        (GENERIC, ("completion", "tools")),
        (QWEN3, ("completion", "tools", "thinking")),
        (HARMONY, ("completion", "tools", "thinking")),
    ],
)
def test_what_a_model_can_do(template, wanted):
    assert capabilities(template) == wanted


def test_marks_are_shown_only_to_a_parser_that_looks_for_them():
    assert "<|python_tag|>" in marks_of(LLAMA3, True) and not marks_of(LLAMA3, False)
    assert "<|channel|>" in marks_of(HARMONY, False) and "</think>" in marks_of(QWEN3, False)
