"""Live traffic as a workload without text."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from hetero.bench.record import record
from hetero.bench.recorded import read_jsonl
from hetero.bench.server_info import ServerError
from hetero.bench.workload import Sizes
from hetero.request import OutputDelta
from hetero.server.app import RECORDER
from hetero.server.recording import MAX_RECORDINGS

from .client import running, until
from .fake_engine import FakeEngine


async def test_what_is_recorded_can_be_played_again(tmp_path: Path) -> None:
    engine, path = FakeEngine(), tmp_path / "load.jsonl"
    shared = "one beginning that they share, "
    async with running(engine, api_keys=("key",)) as client:
        client.session.headers["x-api-key"] = "key"
        await client.complete(prompt="before it began")
        task = asyncio.create_task(record(client.base, "key", 1.5, path, lambda count: None))
        recorder = client.app[RECORDER]
        await until(lambda: recorder._recordings)
        await client.complete(prompt=shared + "and then this", max_tokens=3)
        await client.complete(prompt=shared + "or then that, longer", max_tokens=5, stream=True, n=2)
        await client.chat(max_tokens=4)
        assert await task == 4
        assert not recorder._recordings
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["prompt_tokens"] for line in lines] == [len(shared) + 13, *[len(shared) + 20] * 2, 20]
    assert [line["output_tokens"] for line in lines] == [3, 5, 5, 4]
    assert (
        lines[0]["blocks"][:1] == lines[1]["blocks"][:1] and lines[0]["blocks"][2:] != lines[1]["blocks"][2:]
    )
    assert lines[1]["blocks"] == lines[2]["blocks"] and all(line["at"] >= 0 for line in lines)
    assert "beginning" not in path.read_text()
    sessions = read_jsonl(path).sessions(1, 9, Sizes())
    assert [len(s.turns[0].messages[0]["content"].split()) for s in sessions] == [
        line["prompt_tokens"] for line in lines
    ]


async def test_an_answer_that_is_cut_at_its_indent_is_recorded(tmp_path: Path) -> None:
    async with running(FakeEngine("    a\nb")) as client:
        task = asyncio.create_task(record(client.base, None, 0.8, tmp_path / "a", lambda count: None))
        await until(lambda: client.app[RECORDER]._recordings)
        reply = await client.post("/completion", {"prompt": "hi", "n_indent": 4})
        assert await task == 1
    line = json.loads((tmp_path / "a").read_text())
    assert reply.json["content"] == "    a\n" and line["output_tokens"] == reply.json["tokens_predicted"] == 7


async def test_recordings_are_bounded() -> None:
    async with running(FakeEngine()) as client, contextlib.AsyncExitStack() as held:
        url = client.base + "/recording?seconds=60"
        for _ in range(MAX_RECORDINGS):
            await held.enter_async_context(client.session.get(url))
        reply = await client.get("/recording?seconds=60")
        assert reply.status == 429 and reply.error["code"] == "rate_limit_exceeded"
        await held.aclose()
        await until(lambda: not client.app[RECORDER]._recordings)
        assert (await client.get("/recording?seconds=0.01")).status == 200


async def test_prompts_of_a_million_tokens(tmp_path: Path) -> None:
    async with running(FakeEngine()) as client:
        task = asyncio.create_task(record(client.base, None, 1.5, tmp_path / "a", lambda count: None))
        recorder = client.app[RECORDER]
        await until(lambda: recorder._recordings)
        ended = recorder.watch([range(1_000_000)], 1)
        assert ended is not None
        ended(0, OutputDelta())
        assert await task == 1
    assert len(json.loads((tmp_path / "a").read_text())["blocks"]) == 62_500


async def test_names_are_a_recordings_own(tmp_path: Path) -> None:
    async with running(FakeEngine()) as client:
        tasks = [
            asyncio.create_task(record(client.base, None, 0.8, tmp_path / name, lambda count: None))
            for name in "ab"
        ]
        recorder = client.app[RECORDER]
        await until(lambda: len(recorder._recordings) == 2)
        await client.complete(prompt="the same text for both of them", max_tokens=1)
        assert await asyncio.gather(*tasks) == [1, 1]
    one, other = (json.loads((tmp_path / name).read_text())["blocks"] for name in "ab")
    assert len(one) == len(other) == 1 and one != other


async def test_who_may_record(tmp_path: Path) -> None:
    async with running(FakeEngine(), api_keys=("key",)) as client:
        with pytest.raises(ServerError, match="HTTP 401; --api-key"):
            await record(client.base, "wrong", 1, tmp_path / "x", lambda count: None)
        for wrong in ("", "?seconds=0", "?seconds=x", "?seconds=1e9", "?seconds=nan"):
            reply = await client.get(f"/recording{wrong}", headers={"x-api-key": "key"})
            assert reply.status == 400 and reply.error["param"] == "seconds"
    assert list(tmp_path.iterdir()) == []
