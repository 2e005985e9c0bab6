"""llama-server's routes, as llama.vscode, Zed and other clients of it use them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.server.llamacpp.ending import EndWatch
from hetero.server.llamacpp.read import Ending

from .client import Client, running
from .fake_engine import BOS, FakeEngine

TEXT = "Hello, wörld 😸!"


async def test_completion(client: Client, engine: FakeEngine) -> None:
    """In one piece: the text, why it ended, what it cost, what was understood."""
    answer = (await client.post("/completion", {"prompt": "hi", "n_predict": 9, "return_tokens": True})).json
    assert answer["content"] == TEXT[:8] and answer["tokens"] == list(TEXT.encode())[:9]
    assert answer["stop"] is True and answer["stop_type"] == "limit" and answer["stopping_word"] == ""
    assert (answer["tokens_predicted"], answer["tokens_evaluated"], answer["truncated"]) == (9, 2, False)
    assert answer["prompt"] == "hi" and answer["model"] == "fake-model"
    settings = answer["generation_settings"]
    assert (settings["temperature"], settings["top_k"], settings["top_p"], settings["min_p"]) == (
        0.8,
        40,
        0.95,
        0.05,
    )
    assert settings["n_predict"] == 9 and settings["n_ctx"] == 512
    ended = (await client.post("/completions", {"prompt": "hi"})).json
    assert ended["content"] == TEXT and ended["stop_type"] == "eos" and ended["tokens"] == []
    word = (await client.post("/completion", {"prompt": "hi", "stop": [", w"]})).json
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("Hello", "word", ", w")


async def test_a_stream_ends_without_done(client: Client) -> None:
    events = (await client.post("/completion", {"prompt": "hi", "stream": True, "n_probs": 1})).events
    *parts, last = events
    assert "".join(part["content"] for part in parts) == TEXT
    assert all(part["stop"] is False for part in parts) and last["stop"] is True
    assert [token for part in parts for token in part["tokens"]] == [*TEXT.encode(), 258]
    assert [p["tokens_predicted"] for p in parts] == list(range(1, len(parts) + 1))
    assert last["content"] == "" and last["tokens"] == [] and "completion_probabilities" not in last
    probabilities = [entry for part in parts for entry in part["completion_probabilities"]]
    assert [p["id"] for p in probabilities] == [*TEXT.encode(), 258]
    assert set(probabilities[0]) == {"id", "token", "bytes", "logprob", "top_logprobs"}


async def test_prompts_of_every_form(client: Client, engine: FakeEngine) -> None:
    engine.add_bos = True
    for prompt, ids in (
        ("ab", [BOS, 97, 98]),
        ([97, 98], [97, 98]),
        ([97, "b", 99], [97, 98, 99]),
        (["a", 98], [BOS, 97, 98]),
        ({"prompt_string": "ab"}, [BOS, 97, 98]),
    ):
        await client.post("/completion", {"prompt": prompt, "n_predict": 1})
        assert engine.submitted[-1][0] == ids, prompt
    many = (
        await client.post("/completion", {"prompt": ["a", [98], ["c", 100]], "n_predict": 2, "n_cmpl": 2})
    ).json
    assert [a["index"] for a in many] == list(range(6)) and len(many) == 6
    assert [a["prompt"] for a in many] == ["a", "a", "b", "b", "cd", "cd"]


async def test_sampling_fields(client: Client, engine: FakeEngine) -> None:
    body = {
        "prompt": "x", "n_predict": -1, "temperature": -0.5, "seed": -1, "repeat_penalty": 1.1, "id_slot": 0,
        "cache_prompt": True, "samplers": ["top_k", "temperature"], "top_p": 0.5, "max_tokens": None,
        "logit_bias": [[97, 2.5], ["bc", -1], [100, False]],
    }  # fmt: skip
    assert (await client.post("/completion", body)).status == 200
    params = engine.submitted[-1][1]
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0, 40, 1.0, 0.0)
    assert (params.seed, params.max_tokens, params.repetition_penalty) == (None, None, 1.1)
    assert params.logit_bias == {97: 2.5, 98: -1.0, 99: -1.0, 100: -100.0}
    await client.post("/completion", {"prompt": "x", "logit_bias": {"97": 1, "b": 2}})
    assert engine.submitted[-1][1].logit_bias == {97: 1.0, 98: 2.0}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 3.5]}, "prompt"),
        ({"prompt": [97, 999]}, "prompt"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "prompt"),
        ({"prompt": "a", "n_predict": -3}, "n_predict"),
        ({"prompt": "a", "mirostat": 2}, "mirostat"),
        ({"prompt": "a", "post_sampling_probs": True}, "post_sampling_probs"),
        ({"prompt": "a", "repeat_penalty": 1.2, "repeat_last_n": 8}, "repeat_last_n"),
        ({"prompt": "a", "logit_bias": [[1]]}, "logit_bias"),
        ({"prompt": "a", "logit_bias": [[999, 1]]}, "logit_bias"),
        ({"prompt": "a", "n_probs": 99}, "n_probs"),
        ({"prompt": "a", "response_fields": [1]}, "response_fields"),
        ({"prompt": "a", "n_indent": -1}, "n_indent"),
        ({"prompt": "a", "samplers": "top_k"}, "samplers"),
    ],
)
async def test_bad_fields_are_named(client: Client, body: dict[str, Any], field: str) -> None:
    reply = await client.post("/completion", body)
    assert reply.status == 400 and reply.error["param"] == field


async def test_response_fields(client: Client) -> None:
    names = ["content", "generation_settings/top_k", "no/such/field", "stop"]
    reply = await client.post("/completion", {"prompt": "hi", "n_predict": 2, "response_fields": names})
    assert reply.json == {"content": "He", "top_k": 40, "stop": True}


async def test_infill_as_llama_vscode_asks(client: Client, engine: FakeEngine) -> None:
    body = {
        "input_prefix": "def f():\n", "input_suffix": "\nf()", "prompt": "    re", "n_predict": 5,
        "input_extra": [{"text": "x = 1", "filename": "a.py"}, {"text": "y"}],
        "top_k": 40, "top_p": 0.99, "stream": False, "n_indent": 0, "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
        "response_fields": ["content", "tokens_evaluated", "truncated"],
    }  # fmt: skip
    refused = await client.post("/infill", body)
    assert refused.status == 400 and refused.error["param"] == "suffix"
    engine.fills_in = True
    reply = await client.post("/infill", body)
    assert reply.json["content"] == TEXT[:5] and set(reply.json) == {
        "content",
        "tokens_evaluated",
        "truncated",
    }
    assert bytes(engine.submitted[-1][0]) == b"[a.py:x = 1][tmp:y]<def f():\n|\nf()>    re"
    missing = await client.post("/infill", {"prompt": "x"})
    assert missing.status == 400 and missing.error["param"] == "input_prefix"
    wrong = await client.post("/infill", {**body, "input_extra": [{"text": 3}]})
    assert wrong.error["param"] == "input_extra[0].text"


async def test_warming_up_computes_the_prompt_and_answers_nothing(client: Client, engine: FakeEngine) -> None:
    engine.fills_in = True
    for stream in (False, True):
        body = {"input_prefix": "a", "input_suffix": "b", "n_predict": 0, "stream": stream}
        reply = await client.post("/infill", body)
        last = reply.events[-1] if stream else reply.json
        assert last["content"] == "" and last["tokens_predicted"] == 0 and last["tokens_evaluated"] == 5
        assert not stream or len(reply.events) == 1
        assert engine.submitted[-1][1].max_tokens == 1


async def test_completions_suffix(client: Client, engine: FakeEngine) -> None:
    refused = await client.complete(suffix="b")
    assert refused.status == 400 and refused.error["param"] == "suffix"
    engine.fills_in = True
    assert (await client.complete(prompt="a", suffix="b")).json["choices"][0]["text"] == TEXT
    assert bytes(engine.submitted[-1][0]) == b"<a|b>"
    assert (await client.complete(prompt=[97], suffix="b")).error["param"] == "suffix"


async def test_an_answer_ends_before_a_smaller_indent(engine: FakeEngine) -> None:
    engine.script = "    a = 1\n    b = 2\nprint(a)\n    c"
    async with running(engine) as client:
        reply = await client.post("/completion", {"prompt": "hi", "n_indent": 4})
        assert reply.json["content"] == "    a = 1\n    b = 2\n" and reply.json["stop_type"] == "limit"
        events = (await client.post("/completion", {"prompt": "hi", "n_indent": 4, "stream": True})).events
        assert "".join(e["content"] for e in events) == "    a = 1\n    b = 2\n" and events[-1]["stop"]
        two = await client.post("/completion", {"prompt": ["hi", "ho"], "n_indent": 4})
        assert {a["content"] for a in two.json} == {"    a = 1\n    b = 2\n"}
        assert not engine.running


@given(st.text("ab \n\t", max_size=40), st.integers(1, 4), st.data())
def test_the_end_does_not_depend_on_pieces(text: str, indent: int, data: Any) -> None:
    """Against a reading of whole lines."""
    lines, kept = text.split("\n"), []
    for i, line in enumerate(lines):
        body = line.lstrip(" \t")
        if i and body and len(line) - len(body) < indent:
            break
        kept.append(line)
    over = len(kept) < len(lines)
    expected = "\n".join(kept) + ("\n" if over else "")
    watch, found, ended = EndWatch(Ending(0.0, indent)), "", False
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    for a, b in itertools.pairwise([0, *cuts, len(text)]):
        if not ended:
            piece, ended = watch.take(text[a:b])
            found += piece
    assert ended == over
    assert found.rstrip(" \t") == expected.rstrip(" \t")


def test_time_counts_from_the_first_text_and_needs_a_line_break() -> None:
    times = iter([0.0, 5.0, 5.5, 6.2, 6.3])
    watch = EndWatch(Ending(1.0, 0), lambda: next(times))
    taken = [watch.take(text) for text in ("", "a", "b", "c", "d\n")]
    assert [over for _, over in taken] == [False, False, False, False, True]


async def test_tokenize_and_back(client: Client, engine: FakeEngine) -> None:
    engine.add_bos = True
    assert (await client.post("/tokenize", {"content": "aé"})).json == {"tokens": [97, 195, 169]}
    with_bos = await client.post("/tokenize", {"content": "a", "add_special": True, "with_pieces": True})
    assert with_bos.json == {"tokens": [{"id": BOS, "piece": "<s>"}, {"id": 97, "piece": "a"}]}
    pieces = await client.post("/tokenize", {"content": "é", "with_pieces": True})
    assert [t["piece"] for t in pieces.json["tokens"]] == [[195], [169]]
    assert (await client.post("/detokenize", {"tokens": [97, 195, 169]})).json == {"content": "aé"}
    assert (await client.post("/detokenize", {"tokens": [9999]})).error["param"] == "tokens"
    assert (await client.post("/tokenize", {})).error["param"] == "content"


async def test_apply_template(client: Client) -> None:
    reply = await client.post("/apply-template", {"messages": [{"role": "user", "content": "hi"}]})
    assert reply.json == {"prompt": "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"}
    assert (await client.post("/apply-template", {})).error["param"] == "messages"


async def test_props_and_slots(client: Client, engine: FakeEngine) -> None:
    props = (await client.get("/props")).json
    assert props["default_generation_settings"]["n_ctx"] == 512 and props["total_slots"] == 4
    assert props["chat_template"] == engine.template_source and props["modalities"]["vision"] is False
    assert "/" not in props["model_path"]
    slots = (await client.get("/slots")).json
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3] and not any(slot["is_processing"] for slot in slots)
    assert (await client.get("/v1/health")).json == {"status": "ok"}
