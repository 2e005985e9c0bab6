"""`hetero bench` against a small server of the test's own, which counts, queues and fails as it is told."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from echo_server import Echo, serving
from hypothesis import given, settings
from hypothesis import strategies as st

import cli
from hetero.bench.client import Record
from hetero.bench.distributions import Lengths, arrival_times, parse_lengths
from hetero.bench.experiment import run_of
from hetero.bench.load import Load, Run, run_load
from hetero.bench.recorded import Recorded, Shape, find_workload, read_jsonl, text_of_blocks
from hetero.bench.results import Limits, parse_limits, summarize
from hetero.bench.server_info import _few, find_out
from hetero.bench.workload import WORKLOADS, Sizes, WorkloadError


def run(url: str, load: Load, sessions: int = 40, workload: str = "chat") -> Run:
    info = asyncio.run(find_out(url, "echo", None, None, None, True, 0.0))
    drawn = WORKLOADS[workload].sessions(1, sessions, Sizes(Lengths("fixed", 20), Lengths("fixed", 4)))
    return run_load(info.target, drawn, load, 1)


def test_open_loop_shows_the_queue_that_closed_loop_hides():
    """At 1.5 times what the server can do the queue grows; a client that waits for answers never sees it."""
    with serving(Echo) as (url, _):
        closed = summarize(run(url, Load(concurrency=1)), Limits(ttft=0.1))
        rate = 1.5 * closed.request_rate
        opened = summarize(run(url, Load(rate, burstiness=0)), Limits(ttft=0.1))
    assert closed.answered == opened.answered == 40
    # 40 arrivals while 27 are served: the last ones wait for 13 others
    assert opened.ttft["p95"] > 4 * closed.ttft["p95"]
    assert opened.good is not None and closed.good is not None and opened.good < closed.good


def test_closed_loop_has_as_many_clients_as_it_says():
    with serving(Echo) as (url, echo):
        run(url, Load(concurrency=3), 12)
        assert echo.most == 3 and len(echo.bodies) == 12


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("500", "HTTP 500"),
        ("hangs up", "ClientPayloadError"),
        ("error", "the stream ended with an error"),
        ("rubbish", "JSONDecodeError"),
        ("short", "3 tokens in place of 4"),
        ("unfinished", "incomplete: no finish_reason"),
    ],
)
def test_one_bad_answer_is_reported_and_not_averaged_away(how: str, said: str, tmp_path: Path):
    out = tmp_path / "record.json"
    with serving(lambda: Echo(lambda number: how if number == 5 else "well")) as (url, _):
        arguments = ["bench", url, "-n", "12", "-c", "2", "--warm-up", "0", "--prompt-tokens", "20"]
        done = CliRunner().invoke(cli.main, [*arguments, "--output-tokens", "4", "-o", str(out)])
    assert done.exit_code == 1
    assert "Not every request was answered" in done.output and said in done.output
    record = json.loads(out.read_text())
    assert record["good"] is False
    (result,) = record["results"]
    assert result["summary"]["answered"] == 11 and sum(result["summary"]["errors"].values()) == 1
    assert [bool(r["error"]) for r in result["requests"]].count(True) == 1


def test_a_record_gives_its_numbers_again_and_has_no_text(tmp_path: Path):
    out = tmp_path / "record.json"
    with serving(Echo) as (url, echo):
        arguments = ["bench", url, "-n", "6", "--sweep", "concurrency=1,2", "--warm-up", "1", "-o", str(out)]
        done = CliRunner().invoke(
            cli.main, [*arguments, "--prompt-tokens", "30", "--output-tokens", "3", "--json"]
        )
        assert done.exit_code == 0, done.output
        asked = [m["content"] for body in echo.bodies for m in body["messages"]]
    assert len(asked) == 1 + 2 * 6 and len(set(asked)) == 13  # nothing is asked twice
    record = json.loads(out.read_text())
    assert record == json.loads(done.output)
    for result in record["results"]:
        again = summarize(run_of(result), Limits())
        assert (
            again.ttft == result["summary"]["ttft"] and again.output_rate == result["summary"]["output_rate"]
        )
    assert not any(text[:40] in out.read_text() for text in asked)


@pytest.mark.parametrize("path", ["/home/me/models/m.gguf", "C:\\Users\\me\\m.gguf", "m.gguf"])
def test_a_record_does_not_say_where_the_model_is(path: str):
    assert _few({"model_path": path, "total_slots": 4, "chat_template": "x" * 300}) == {
        "model_path": "m.gguf",
        "total_slots": 4,
    }


def test_what_was_measured_is_shown_even_if_it_cannot_be_written(tmp_path: Path):
    (out := tmp_path / "taken").mkdir()
    with serving(Echo) as (url, _):
        arguments = [
            "bench",
            url,
            "-n",
            "2",
            "--warm-up",
            "0",
            "--prompt-tokens",
            "9",
            "--output-tokens",
            "3",
        ]
        done = CliRunner().invoke(cli.main, [*arguments, "-o", str(out)])
    assert done.exit_code == 1 and "TTFT p50" in done.stdout
    assert done.stderr.startswith(f"hetero: --out {out}: ") and len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [out]


def test_servers_are_compared_on_the_same_text():
    with serving(Echo) as (one, echo), serving(Echo) as (two, other):
        arguments = ["bench", one, two, "-n", "4", "--repeat", "2", "--warm-up", "0"]
        done = CliRunner().invoke(cli.main, [*arguments, "--prompt-tokens", "9", "--output-tokens", "3"])
        assert done.exit_code == 0, done.output
        assert [b["messages"] for b in echo.bodies] == [b["messages"] for b in other.bodies]
    assert "Against" in done.output and "x (" in done.output


def test_an_agents_turns_build_on_each_other():
    with serving(Echo) as (url, echo):
        info = asyncio.run(find_out(url, "echo", None, None, None, True, 0.0))
        (session,) = WORKLOADS["agent"].sessions(3, 1, Sizes(output=Lengths("fixed", 3)))
        quick = [type(session)(tuple(type(t)(t.messages, t.max_tokens) for t in session.turns))]
        assert all(r.error is None for r in run_load(info.target, quick, Load(concurrency=1), 1).records)
        first, second = echo.bodies[0]["messages"], echo.bodies[1]["messages"]
        assert second[: len(first)] == first
        assert second[len(first)] == {"role": "assistant", "content": "w0 w1 w2 "}
        assert len(echo.bodies) == len(session.turns) >= 3


def test_numbers():
    """By hand, and by numpy's own percentiles."""
    rng = random.Random(7)
    records = []
    for i in range(50):
        start, wait, gap, tokens = i * 0.1, rng.uniform(0.1, 0.9), rng.uniform(0.01, 0.05), rng.randint(2, 9)
        arrivals = [start + wait + k * gap for k in range(tokens)]
        records.append(
            Record(i, 0, start, start, arrivals, arrivals[-1] + 0.01, 100, 40, tokens, finish_reason="length")
        )
    found = summarize(Run(tuple(records), 10.0), Limits(ttft=0.5))
    waits = [r.arrivals[0] - r.sent for r in records]
    assert found.ttft["p95"] == pytest.approx(float(np.percentile(waits, 95)))
    assert found.good == sum(w <= 0.5 for w in waits) / 50 and found.goodput == pytest.approx(5 * found.good)
    assert found.output_rate == pytest.approx(sum(r.output_tokens for r in records) / 10)
    assert found.cached == pytest.approx(0.4) and found.queue == {}
    assert records[0].tpot == pytest.approx(records[0].gaps[0])


def test_lengths_and_limits():
    rng = random.Random(1)
    assert {parse_lengths("7").draw(rng) for _ in range(9)} == {7}
    assert {parse_lengths("3..5").draw(rng) for _ in range(99)} == {3, 4, 5}
    drawn = [parse_lengths("lognormal(200, 0.5)").draw(rng) for _ in range(4000)]
    assert 190 < np.median(drawn) < 210 and 0.45 < np.std(np.log(drawn)) < 0.55
    for wrong in ("", "0", "-3", "5..3", "lognormal(0,1)", "lognormal(9,99)", "1e9", "ten"):
        with pytest.raises(ValueError, match=r"tokens|length|spread|first"):
            parse_lengths(wrong)
    assert parse_limits("ttft=600ms, tpot=0.05s") == Limits(ttft=0.6, tpot=0.05)
    for wrong in ("", "ttft", "ttft=6", "ttft=1s,ttft=2s", "speed=1s"):
        with pytest.raises(ValueError):
            parse_limits(wrong)


@pytest.mark.parametrize("burstiness", [0.0, 1.0, 3.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float):
    gaps = np.diff([0.0, *arrival_times(random.Random(5), 20.0, burstiness, 20_000)])
    assert 1 / np.mean(gaps) == pytest.approx(20, rel=0.08)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness, rel=0.08, abs=1e-6)


def test_workloads_are_the_same_for_the_same_seed_only():
    for workload in WORKLOADS.values():
        one, same, other = (workload.sessions(seed, 3, Sizes()) for seed in (1, 1, 2))
        assert one == same and one != other
        assert len({s.turns[0].messages[-1]["content"] for s in one}) == 3
    shared = WORKLOADS["shared-prefix"].sessions(1, 3, Sizes())
    assert len({s.turns[0].messages[0]["content"] for s in shared}) == 1


def test_recorded_requests(tmp_path: Path):
    path = tmp_path / "load.jsonl"
    lines = [
        {"at": 0.5, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5},
        {"at": 0, "prompt": "Once"},
        {"at": 1, "prompt_tokens": 40, "output_tokens": 7, "blocks": ["a", "b"]},
        {"at": 2, "prompt_tokens": 40, "output_tokens": 7, "blocks": ["a", "c"]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    recorded = find_workload(str(path)).sessions(1, 9, Sizes())
    assert [s.arrival for s in recorded] == [0.5, 0, 1, 2]
    first, second = (s.turns[0].messages[0]["content"].split() for s in recorded[2:])
    assert len(first) == len(second) == 40 and first[:16] == second[:16] and first[16:32] != second[16:32]
    assert text_of_blocks(["a", "b"], 40, 1) == " ".join(first)
    for wrong, why in (
        ("[]", "line 1: is not an object"),
        ('{"at": -1, "prompt": "x"}', "at:"),
        ("{", "line 1"),
        ('{"prompt_tokens": true}', "blocks"),
        ('{"messages": []}', "needs messages"),
        ("", "no request"),
    ):
        path.write_text(wrong)
        with pytest.raises(WorkloadError, match=why):
            read_jsonl(path)


def test_a_recording_without_text_is_drawn_anew_for_each_seed(tmp_path: Path):
    path = tmp_path / "load.jsonl"
    line = {"at": 1, "prompt_tokens": 40, "output_tokens": 7, "blocks": ["a", "b"]}
    path.write_text(json.dumps(line) + "\n" + json.dumps({**line, "blocks": ["a", "c"]}) + "\n")
    recorded = read_jsonl(path)
    texts = {
        seed: [s.turns[0].messages[0]["content"] for s in recorded.sessions(seed, 9, Sizes())]
        for seed in ("1/0/0", "1/1/0", "1/warm-up")
    }
    assert len({text for found in texts.values() for text in found}) == 6
    assert all(one.split()[:16] == two.split()[:16] for one, two in texts.values())
    again = recorded.sessions("1/0/0", 9, Sizes())
    assert texts["1/0/0"] == [s.turns[0].messages[0]["content"] for s in again]


def test_what_a_file_asks_is_not_in_the_cache_by_the_warm_up(tmp_path: Path):
    path = tmp_path / "load.jsonl"
    path.write_text('{"prompt": "Hello there", "max_tokens": 3}\n')
    with serving(Echo) as (url, echo):
        done = CliRunner().invoke(cli.main, ["bench", url, "-w", str(path), "--warm-up", "1"])
        assert done.exit_code == 0, done.output
        asked = [body["messages"][0]["content"] for body in echo.bodies]
    assert asked[1] == "Hello there" != asked[0] and len(asked) == 2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.floats(1, 30))
def test_parts_of_a_recording(times: list[float], seconds: float):
    recorded = Recorded("x", "x", tuple(Shape(i + 1, 1, (), at) for i, at in enumerate(times)))
    for parts in (recorded.parts(seconds), recorded.parts(None)):
        numbers = [entry.prompt for part in parts for entry in part.recorded]
        assert sorted(numbers) == list(range(1, len(times) + 1)) and all(part.recorded for part in parts)
    stretches = recorded.parts(seconds)
    counts = [len(part.recorded) for part in stretches]
    assert counts == sorted(counts, reverse=True)
    for part in stretches:
        assert all(-1e-6 <= (entry.arrival or 0.0) <= seconds for entry in part.recorded)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rate", "1", "-c", "2"], "--rate and --concurrency both say"),
        (["--sweep", "threads=1"], "--sweep threads=1: must be"),
        (["--sweep", "concurrency=0"], "--sweep"),
        (["--slo", "fast"], "--slo: 'fast' is not a limit"),
        (["--prompt-tokens", "many"], "--prompt-tokens: 'many' is not a length"),
        (["-w", "poetry"], "poetry: neither a .jsonl file nor one of chat"),
        (["-o", "/nowhere/at/all.json"], "there is no folder"),
        (["--plot", "load.gif"], "must end with one of"),
        ([], "no answer; is the server running?"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments: list[str], said: str):
    done = CliRunner().invoke(cli.main, ["bench", "http://127.0.0.1:9", *arguments])
    assert done.exit_code == 1 and said in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_prompt_that_cannot_fit_is_found_before_the_run():
    with serving(Echo) as (url, echo):
        done = CliRunner().invoke(cli.main, ["bench", url, "--prompt-tokens", "5000", "--warm-up", "0"])
        assert not echo.bodies
    assert done.exit_code == 1 and "does not fit" in done.stderr


@pytest.mark.parametrize("suffix", [".png", ".svg", ".html"])
def test_pictures(suffix: str, tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"load{suffix}"
    with serving(Echo) as (url, _):
        arguments = [
            "bench",
            url,
            "-n",
            "4",
            "--sweep",
            "concurrency=1,2",
            "--plot",
            str(path),
            "--warm-up",
            "0",
        ]
        done = CliRunner().invoke(cli.main, [*arguments, "--prompt-tokens", "9", "--output-tokens", "3"])
    assert done.exit_code == 0, done.output
    head = path.read_bytes()[:400]
    assert head.startswith(b"\x89PNG") if suffix == ".png" else b"<svg" in path.read_bytes()
