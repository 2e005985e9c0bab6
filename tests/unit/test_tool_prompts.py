"""What models are told of tools, calls and answers."""

from __future__ import annotations

import asyncio
import json

import pytest

from hetero.request import RequestError
from hetero.text.grammar import GrammarCompiler
from hetero.text.parts import ReasoningPart, TextPart
from hetero.text.service import TextService
from hetero.text.template import CHATML, ChatTemplate
from hetero.text.tokenizer import Tokenizer
from hetero.text.tools.choice import choose
from hetero.text.tools.harmony import with_thinking
from hetero.text.tools.prompt import for_template, in_plain_messages

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
NOW = {"type": "function", "function": {"name": "now", "description": "the time", "parameters": {}}}
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
HISTORY = [
    USER,
    {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL, {**CALL, "id": "c2"}]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "rain"}]},
    {"role": "user", "content": "thanks"},
]


def test_calls_and_answers_in_plain_messages():
    user, assistant, answers = in_plain_messages(HISTORY, [])
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    assert user == USER
    assert assistant == {"role": "assistant", "content": f"Let me look.\n{call}\n{call}"}
    assert answers == {
        "role": "user",
        "content": "<tool_response>\nsunny\n</tool_response>\n"
        "<tool_response>\nrain\n</tool_response>\nthanks",
    }
    assert HISTORY[1]["content"] == "Let me look."  # the caller's messages are as they were


@pytest.mark.parametrize(
    "first", [USER, {"role": "system", "content": [{"type": "text", "text": "Be kind."}]}]
)
def test_tools_are_told_in_the_first_message(first):
    plain = in_plain_messages([first, USER], [WEATHER, NOW])
    told = plain[0]["content"]
    assert plain[0]["role"] == first["role"] and plain[1] == USER
    assert json.dumps(WEATHER["function"]) in told and "the time" in told and "<tool_call>" in told
    assert told.startswith("Be kind.") if first["role"] == "system" else told.endswith("hi")


def test_templates_may_look_at_the_properties():
    assert for_template([NOW])[0]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert for_template([WEATHER])[0]["function"]["parameters"]["properties"] == {}
    assert NOW["function"]["parameters"] == {}


@pytest.mark.parametrize(
    "choice, parallel, wanted",
    [
        ("none", True, ([], False, False)),
        ("auto", True, (["weather", "now"], False, True)),
        ("required", True, (["weather", "now"], True, True)),
        ("required", False, (["weather", "now"], True, False)),
        ({"name": "now"}, True, (["now"], True, False)),
        ({"names": ["now"], "mode": "auto"}, True, (["now"], False, True)),
        ({"names": ["now", "weather"], "mode": "required"}, True, (["weather", "now"], True, True)),
    ],
)
def test_choices(choice, parallel, wanted):
    tools, forced, several = choose([WEATHER, NOW], choice, parallel)
    assert ([tool["function"]["name"] for tool in tools], forced, several) == wanted
    assert choose([], choice, parallel) == ((), False, False)


def test_an_unknown_tool_is_named():
    with pytest.raises(RequestError, match="'f'") as error:
        choose([WEATHER], {"name": "f"}, True)
    assert error.value.field == "tool_choice"


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return Tokenizer(smollm2_path)


def ask(tokenizer, source: str, **kwargs):
    service = TextService(tokenizer, ChatTemplate.of(source, tokenizer), GrammarCompiler(tokenizer))
    try:
        prompt = asyncio.run(service.chat([USER], **kwargs))
        return prompt, "".join(map(tokenizer.token_text, prompt.token_ids))
    finally:
        service.close()


def test_a_template_that_takes_tools_is_given_them(tokenizer):
    source = "{% if tools %}{{ tools | tojson }}{% endif %}<tool_call>" + CHATML
    prompt, text = ask(tokenizer, source, tools=[WEATHER], tool_choice="auto")
    assert text.startswith('[{"type": "function"') and "<tools>" not in text and prompt.grammar is None
    prompt, text = ask(tokenizer, source, tools=[WEATHER], tool_choice="none")
    assert text.startswith("<tool_call>") and "weather" not in text
    prompt, text = ask(tokenizer, CHATML, tools=[WEATHER], tool_choice="required")
    assert "<tools>" in text and prompt.grammar is not None


@pytest.mark.parametrize(
    "thinking, shown",
    [(None, "--"), (True, "True-"), (False, "False-"), ("high", "True-high")],
)
def test_thinking_reaches_the_template(tokenizer, thinking, shown):
    source = "{{ enable_thinking }}-{{ reasoning_effort }}{% if enable_thinking is not defined %}-{% endif %}"
    assert ask(tokenizer, source, thinking=thinking)[1] == shown
    assert (
        ask(tokenizer, "{{ enable_thinking }}", thinking=True, template_kwargs={"enable_thinking": 3})[1]
        == "3"
    )
    harmony = "<|channel|><|message|>{{ reasoning_effort }}"
    assert ("low" in ask(tokenizer, harmony, thinking=False)[1]) and "high" in ask(
        tokenizer, harmony, thinking="high"
    )[1]


def test_control_tokens_that_the_parser_needs_are_shown(tokenizer, monkeypatch):
    assert ask(tokenizer, "</think>" + CHATML)[0].shown == {}  # no token of this vocabulary
    monkeypatch.setattr("hetero.text.reasoning.TAGS", (("<jupyter_start>on", "<jupyter_code>"),))
    shown = ask(tokenizer, "<jupyter_code>" + CHATML)[0].shown
    names = ("<jupyter_start>", "<jupyter_code>")
    assert shown == {tokenizer.control_texts[name]: name.encode() for name in names}


def test_what_was_thought_before_a_call_reaches_the_template():
    call = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Look."}
    said = {"role": "assistant", "content": "Sunny.", "reasoning_content": "Easy."}
    assert with_thinking([USER, call, said]) == [USER, {**call, "thinking": "Look."}, said]


def test_reasoning_that_the_assistants_message_has_begun(tokenizer):
    source = "</think>" + CHATML
    service = TextService(tokenizer, ChatTemplate.of(source, tokenizer), GrammarCompiler(tokenizer))
    try:
        for begun, wanted in (
            ("<think>Let me", ReasoningPart("see")),
            ("<think>x</think>So", TextPart("see")),
        ):
            said = {"role": "assistant", "content": begun}
            prompt = asyncio.run(service.chat([USER, said], continue_final_message=True))
            assert prompt.new_parser().push("see") == [wanted]
    finally:
        service.close()
