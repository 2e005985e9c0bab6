"""Answers of every family of models, read in pieces."""

from __future__ import annotations

import json

import pytest
from family_answers import ANSWERS, CODER, GENERIC, HARMONY, HERMES, LLAMA3, NOW, QWEN3, TOOLS
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


@pytest.mark.parametrize("tail", ["<|end|>x", "<|message|>x", "<|messag"])
def test_a_header_without_end_is_text_wherever_it_is_cut(tail):
    text = "a" * 510 + tail
    found = []
    for cut in (0, 491, 505, 513, len(text)):
        parser = parser_for(HARMONY, TOOLS, "<|start|>assistant")
        parts = [*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.finish()]
        found.append("".join(part.text for part in parts if isinstance(part, TextPart)))
    assert len(set(found)) == 1 and found[0].startswith("assistant" + "a" * 510)
