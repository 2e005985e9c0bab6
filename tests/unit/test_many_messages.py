"""Conversations of very many parts are read in one pass: whoever reads them keeps all others waiting.

Each would take minutes if texts or calls were looked at again for each part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from hetero.server.anthropic.messages import read_messages as read_anthropic
from hetero.server.ollama.read import read_messages as read_ollama
from hetero.server.responses.items import to_messages
from hetero.server.tools import read_tool_choice
from hetero.server.validate import Fields
from hetero.text.template import normalize_messages
from hetero.text.tools.choice import choose
from hetero.text.tools.prompt import in_plain_messages

MANY = 60_000
TEXT = "x" * 100
SECONDS = 15  # of computing; it is a few tenths


@pytest.fixture(autouse=True)
def in_one_pass() -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < SECONDS


def test_anthropic() -> None:
    calls = [{"type": "tool_use", "id": str(i), "name": f"t{i}", "input": {}} for i in range(MANY)]
    results = [{"type": "tool_result", "tool_use_id": str(i), "content": "r"} for i in range(MANY)]
    same = [{"role": "user", "content": TEXT}] * MANY
    said = [{"role": "assistant", "content": TEXT}] * MANY
    given = [*same, *said, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    user, assistant, *answers = read_anthropic(Fields({"messages": given}))
    assert user["content"] == "\n\n".join([TEXT] * MANY)
    assert assistant["content"] == TEXT * MANY and len(assistant["tool_calls"]) == MANY
    assert [m["name"] for m in answers] == [f"t{i}" for i in range(MANY)]


def test_anthropic_keeps_the_thoughts_of_messages_in_a_row() -> None:
    thoughts = [{"type": "thinking", "thinking": "first"}, {"type": "text", "text": "a"}]
    more = [{"type": "thinking", "thinking": "second"}, {"type": "text", "text": "b"}]
    given = [
        {"role": "user", "content": "q"},
        *({"role": "assistant", "content": c} for c in (thoughts, more)),
    ]
    assert read_anthropic(Fields({"messages": given}))[1:] == [
        {"role": "assistant", "content": "ab", "reasoning_content": "first\nsecond"}
    ]


def test_responses() -> None:
    said = [{"role": "assistant", "content": TEXT}] * MANY
    calls = [
        {"type": "function_call", "name": f"t{i}", "arguments": "{}", "call_id": str(i)} for i in range(MANY)
    ]
    outputs = [{"type": "function_call_output", "call_id": str(i), "output": "r"} for i in range(MANY)]
    assistant, *answers = to_messages([*said, *calls, *outputs], None)
    assert assistant["content"] == TEXT * MANY and len(assistant["tool_calls"]) == MANY
    assert [m["name"] for m in answers] == [f"t{i}" for i in range(MANY)]


@pytest.mark.parametrize("named", [False, True])
def test_ollama(named: bool) -> None:
    calls = [{"function": {"name": f"t{i % 2}", "arguments": {}}} for i in range(MANY)]
    answers = [{"role": "tool", "content": "r"} | ({"tool_name": "t1"} if named else {})] * MANY
    given = [{"role": "assistant", "tool_calls": calls}, *answers]
    _, *found = read_ollama(Fields({"messages": given}))
    if named:
        odd = [f"call_0_{i}" for i in range(1, MANY, 2)]
        assert [m.get("tool_call_id") for m in found] == odd + [None] * (MANY - len(odd))
    else:
        assert [m["tool_call_id"] for m in found] == [f"call_0_{i}" for i in range(MANY)]


def test_results_told_in_plain_messages() -> None:
    results = [{"role": "tool", "content": TEXT}] * MANY
    (first, second, third) = in_plain_messages(
        [
            *results,
            {"role": "user", "content": "so", "name": "me"},
            {"role": "assistant", "content": "yes"},
            *results,
        ],
        [],
    )
    told = "\n".join([f"<tool_response>\n{TEXT}\n</tool_response>"] * MANY)
    assert first == {"role": "user", "content": f"{told}\nso", "name": "me"}
    assert second["content"] == "yes" and third == {"role": "user", "content": told}


def test_system_messages() -> None:
    (system, user) = normalize_messages([{"role": "system", "content": TEXT}] * MANY + [{"role": "user"}])
    assert system["content"] == "\n\n".join([TEXT] * MANY) and user["content"] == ""


def test_allowed_tools() -> None:
    tools = [{"type": "function", "function": {"name": f"t{i}", "parameters": {}}} for i in range(MANY)]
    entries = [{"type": "function", "name": f"t{i}"} for i in reversed(range(MANY))]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": entries}
    choice = read_tool_choice(Fields({"tool_choice": allowed}), tools)
    assert choose(tools, choice, True) == (tools, False, True)
