"""The engine's loop over a fake device."""

from __future__ import annotations

import numpy as np
import pytest
from fake_runner import FakeRunner, make_engine, text_after

from hetero.engine import Engine
from hetero.pipeline.stage import StageTimes
from hetero.request import FinishReason, OutputDelta, Request, RequestError
from hetero.sampling.params import SamplingParams


class Client:
    """Collects one request's deltas."""

    def __init__(self, engine: Engine, prompt: str, request_id: str = "r", grammar=None, **params):
        self.deltas: list[OutputDelta] = []
        self.request = Request(request_id, list(prompt.encode()), SamplingParams(**params), engine.clock())
        engine.add(self.request, self.deltas.append, grammar)

    @property
    def text(self) -> str:
        return "".join(d.text for d in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [t for d in self.deltas for t in d.token_ids]

    @property
    def reason(self) -> FinishReason | None:
        assert all(d.finish_reason is None for d in self.deltas[:-1])
        return self.deltas[-1].finish_reason if self.deltas else None


def finish(engine: Engine, rounds: int = 2000) -> None:
    for _ in range(rounds):
        more = engine.step()
        engine.check_invariants()
        if not more:
            break
    assert not engine.has_work
    for pool in engine.scheduler.kv.pools:
        assert pool.num_available == pool.num_usable


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 40])
def test_texts_do_not_depend_on_company(depth: int, window: int | None) -> None:
    engine = make_engine(FakeRunner(depth), num_blocks=30, window=window)
    prompts = ["a" * n + str(n) for n in (1, 15, 16, 17, 40, 90, 150, 33)]
    clients = [
        Client(engine, prompt, f"r{i}", max_tokens=60 + i, ignore_eos=True, logprobs=0)
        for i, prompt in enumerate(prompts)
    ]
    finish(engine)
    for i, (client, prompt) in enumerate(zip(clients, prompts, strict=True)):
        assert client.text == text_after(prompt, 60 + i)
        assert client.reason is FinishReason.LENGTH
        last = client.deltas[-1]
        assert (last.num_prompt_tokens, last.num_output_tokens) == (len(prompt), 60 + i)
        assert [p.token_id for d in client.deltas for p in d.logprobs] == client.token_ids
        assert 0 <= last.num_cached_tokens < len(prompt)


def test_second_request_finds_the_first_ones_blocks() -> None:
    engine = make_engine(FakeRunner())
    for turn, cached in enumerate((0, 70)):
        client = Client(engine, "x" * 71, f"r{turn}", max_tokens=1)
        finish(engine)
        assert client.deltas[-1].num_cached_tokens == cached
    assert engine.stats().cached_tokens == 70


def test_stop_string_across_tokens_ends_the_request() -> None:
    whole = text_after("hello", 30)
    engine = make_engine(FakeRunner())
    client = Client(engine, "hello", max_tokens=30, stop=(whole[10:13], "zzzz"))
    finish(engine)
    at = whole.index(whole[10:13])
    assert client.text == whole[:at] and client.reason is FinishReason.STOP
    assert len(client.token_ids) == at + 3, "generation goes on after the match"


def test_held_back_text_comes_at_the_end() -> None:
    whole = text_after("hello", 12)
    engine = make_engine(FakeRunner())
    client = Client(engine, "hello", max_tokens=12, stop=(whole[-1] + "\0",))
    finish(engine)
    assert client.text == whole and client.reason is FinishReason.LENGTH


def test_eos_adds_no_text_and_can_be_ignored() -> None:
    engine = make_engine(FakeRunner())
    stops = Client(engine, "ab!", "a", max_tokens=5)
    goes_on = Client(engine, "ab!", "b", max_tokens=5, ignore_eos=True)
    stop_id = Client(engine, "hello", "c", max_tokens=5, stop_token_ids=(ord(text_after("hello", 2)[1]),))
    finish(engine)
    assert (stops.text, stops.reason, len(stops.token_ids)) == ("", FinishReason.STOP, 1)
    assert goes_on.reason is FinishReason.LENGTH and len(goes_on.token_ids) == 5
    assert (stop_id.text, stop_id.reason) == (text_after("hello", 1), FinishReason.STOP)


class Spelling:
    """A grammar with one sentence. `broken_at` makes it raise there."""

    def __init__(self, text: str, broken_at: int = -1):
        self.left = list(text.encode())
        self.broken_at = broken_at

    def fill_mask(self, row: np.ndarray) -> None:
        if len(self.left) == self.broken_at:
            raise RuntimeError("grammar\nbug")
        row[:] = 0
        row[self.left[0] // 32] = np.array([1 << self.left[0] % 32], np.uint32).view(np.int32)[0]

    def accept(self, token_id: int) -> bool:
        return token_id == self.left.pop(0)

    @property
    def is_finished(self) -> bool:
        return not self.left


def test_grammar_rules_the_output() -> None:
    engine = make_engine(FakeRunner())
    free = Client(engine, "hello", "free", max_tokens=9)
    bound = Client(engine, "hello", "bound", Spelling('{"a":1}'), max_tokens=99, ignore_eos=True)
    broken = Client(engine, "hello", "broken", Spelling('{"a":1}', broken_at=3), max_tokens=99)
    finish(engine)
    assert (bound.text, bound.reason) == ('{"a":1}', FinishReason.STOP)
    assert free.text == text_after("hello", 9)
    assert broken.reason is FinishReason.ERROR and broken.text == '{"a"'
    assert broken.deltas[-1].error == "grammar bug"


def test_a_row_that_cannot_be_sampled_fails_alone() -> None:
    engine = make_engine(FakeRunner())
    poison = next(c for c in text_after("hello", 20) if c not in text_after("w", 20))
    engine.sampler.poison = ord(poison)
    bad = Client(engine, "hello", "bad", max_tokens=20)
    good = Client(engine, "w", "good", max_tokens=20)
    finish(engine)
    assert bad.reason is FinishReason.ERROR and bad.deltas[-1].error == "poisoned"
    assert good.text == text_after("w", 20)


def test_context_bounds() -> None:
    engine = make_engine(FakeRunner(), max_model_len=128)
    with pytest.raises(RequestError, match="128") as refused:
        Client(engine, "x" * 128)
    assert refused.value.code == "context_length_exceeded" and "128 tokens" in str(refused.value)
    with pytest.raises(RequestError):
        Client(engine, "")
    assert not engine.has_work
    one = Client(engine, "x" * 127, "one")
    clamped = Client(engine, "y" * 100, "clamped", max_tokens=100)
    finish(engine)
    assert (len(one.token_ids), one.reason) == (1, FinishReason.LENGTH)
    assert (len(clamped.token_ids), clamped.reason) == (28, FinishReason.LENGTH)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_failed_step_costs_its_requests_only(depth: int) -> None:
    runner = FakeRunner(depth)
    engine = make_engine(runner)
    lost = [Client(engine, f"lost{i}", f"l{i}", max_tokens=20) for i in range(4)]
    engine.step()
    runner.fail_steps = 1
    finish(engine)
    errors = {c.deltas[-1].error for c in lost if c.reason is FinishReason.ERROR}
    assert "the device failed: out of memory" in errors
    for i, client in enumerate(lost):
        if client.reason is FinishReason.ERROR:
            message = client.deltas[-1].error or ""
            assert message.startswith("the device failed: ") and "\n" not in message
            assert client.text == text_after(f"lost{i}", 20)[: len(client.text)]
        else:
            assert client.text == text_after(f"lost{i}", 20)
    later = Client(engine, "lost0", "again", max_tokens=20)
    finish(engine)
    assert later.text == text_after("lost0", 20)


def test_a_batch_that_cannot_be_built_is_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(2)
    engine = make_engine(runner)
    first = Client(engine, "first", "a", max_tokens=3)
    second = Client(engine, "second", "b", max_tokens=3)
    submit, calls = runner.submit, []

    def sometimes(batch) -> None:
        calls.append(batch)
        if len(calls) == 2:
            raise MemoryError
        submit(batch)

    monkeypatch.setattr(runner, "submit", sometimes)
    finish(engine)
    assert first.text == text_after("first", 1), "the step before it counts"
    assert first.reason is FinishReason.ERROR, "it went on in the step behind"
    assert second.reason is FinishReason.ERROR and "MemoryError" in (second.deltas[-1].error or "")


def test_abort_waiting_running_and_in_flight() -> None:
    runner = FakeRunner()
    engine = make_engine(runner, max_num_seqs=2)
    clients = [Client(engine, f"c{i}", f"c{i}", max_tokens=20) for i in range(4)]
    engine.step()
    engine.abort("c3")  # waiting
    assert clients[3].reason is FinishReason.ABORT and clients[3].text == ""
    engine.abort("c0")  # running
    assert clients[0].reason is FinishReason.ABORT
    runner.gate.clear()
    engine._start_step()
    engine.abort("c1")  # in flight
    assert clients[1].reason is None
    runner.gate.set()
    finish(engine)
    assert clients[1].reason is FinishReason.ABORT
    assert clients[2].text == text_after("c2", 20)
    engine.abort("nobody")
    assert engine.stats().cancelled == 3 and engine.stats().finished["length"] == 1


def test_a_sink_that_raises_harms_nobody() -> None:
    engine = make_engine(FakeRunner())
    good = Client(engine, "good", "good", max_tokens=5)

    def sink(delta: OutputDelta) -> None:
        raise RuntimeError("client trouble")

    engine.add(Request("bad", [1, 2], SamplingParams(max_tokens=5)), sink)
    finish(engine)
    assert good.text == text_after("good", 5)


def test_time_outside_the_graph_and_latencies() -> None:
    now = [100.0]
    runner = FakeRunner()
    wait = runner.wait

    def slow_wait(timeout=None):
        now[0] += 0.5
        result = wait(timeout)
        result.stages = (StageTimes(busy_seconds=0.45, graph_seconds=0.4),)
        return result

    runner.wait = slow_wait  # type: ignore[method-assign]
    engine = make_engine(runner, clock=lambda: now[0])
    Client(engine, "timed", max_tokens=4)
    now[0] += 3.0
    finish(engine)
    now[0] += 1000.0  # idle time is nobody's
    Client(engine, "timed", "again", max_tokens=4)
    finish(engine)
    stats = engine.stats()
    assert stats.steps == 8
    assert stats.step_seconds == pytest.approx(4.0) and stats.host_seconds == pytest.approx(0.8)
    assert stats.ttft.sum == pytest.approx(3.5 + 0.5) and sum(stats.ttft.counts) == 2
    assert stats.inter_token.sum == pytest.approx(3.0) and sum(stats.inter_token.counts) == 6
    assert stats.queue.sum == pytest.approx(3.0)
    assert stats.e2e.sum == pytest.approx(5.0 + 2.0)
    assert (stats.prompt_tokens, stats.generated_tokens) == (10, 8)


def test_what_moves_and_prompts_cost_is_what_the_slowest_stage_took() -> None:
    stages = (
        StageTimes(graph_seconds=1.0, move_seconds=0.5, moved_bytes=100),
        StageTimes(graph_seconds=2.0, move_seconds=0.25, moved_bytes=300),
    )

    class Timed(FakeRunner):
        def wait(self, timeout=None, /):
            result = super().wait(timeout)
            assert result is not None
            result.stages = stages
            return result

    engine = make_engine(Timed())
    for i in range(60):
        Client(engine, chr(40 + i).ljust(64), f"r{i}", max_tokens=1)
        finish(engine)
    costs = engine.scheduler.kv.host.costs
    assert costs.token_seconds == pytest.approx(2.0 / 64, rel=0.01)
    assert costs.byte_seconds == pytest.approx(0.5 / 400, rel=0.01)


@pytest.mark.parametrize("other", ["greedy", "logprobs", "grammar", "sampled", "absent"])
def test_all_logits_are_asked_for_where_any_request_needs_them(other: str) -> None:
    asked = []

    class Noting(FakeRunner):
        def submit(self, batch, /) -> None:
            asked.append(batch.only_argmax)
            super().submit(batch)

    engine = make_engine(Noting())
    Client(engine, "hello", "first", temperature=0.0, max_tokens=4)
    if other != "absent":
        params = {"temperature": float(other == "sampled"), "logprobs": 0 if other == "logprobs" else None}
        grammar = Spelling("abcd") if other == "grammar" else None
        Client(engine, "world", "second", grammar, max_tokens=4, **params)
    finish(engine)
    assert asked == [other in ("greedy", "absent")] * 4
