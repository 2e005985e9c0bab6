"""Requests for embeddings in the engine: among answers, cancelled, and when something fails."""

from __future__ import annotations

import numpy as np
import pytest
from fake_runner import FakeRunner, make_engine, text_after

from hetero.engine import Engine
from hetero.request import OutputDelta, Request
from hetero.sampling.params import SamplingParams


def embed(engine: Engine, text: str, name: str, pooling: str = "mean") -> list[OutputDelta]:
    """Queue a request; what comes of it."""
    deltas: list[OutputDelta] = []
    params = SamplingParams(max_tokens=1)
    engine.add(Request(name, list(text.encode()), params, pooling=pooling), deltas.append)
    return deltas


def wanted(text: str) -> np.ndarray:
    rows = np.array([[byte, i] for i, byte in enumerate(text.encode())], np.float64)
    mean = rows.mean(axis=0)
    return (mean / np.linalg.norm(mean)).astype(np.float32)


def run(engine: Engine) -> None:
    while engine.step():
        engine.check_invariants()


@pytest.mark.parametrize("depth", [1, 3])
def test_embeddings_among_answers(depth: int) -> None:
    engine = make_engine(FakeRunner(depth))
    texts = ["short", "long " * 50, "x", "short"]
    found = [embed(engine, text, f"e{i}") for i, text in enumerate(texts)]
    answer: list[OutputDelta] = []
    engine.add(Request("a", list(b"say"), SamplingParams(max_tokens=20, ignore_eos=True)), answer.append)
    run(engine)
    for text, deltas in zip(texts, found, strict=True):
        (delta,) = deltas
        assert delta.finish_reason == "stop" and not delta.text and not delta.token_ids
        assert np.array_equal(np.array(delta.embedding, np.float32), wanted(text))
        assert (delta.num_prompt_tokens, delta.num_output_tokens, delta.num_cached_tokens) == (
            len(text),
            0,
            0,
        )
    assert "".join(delta.text for delta in answer) == text_after("say", 20)
    stats = engine.stats()
    assert stats.generated_tokens == 20 and sum(stats.ttft.counts) == 1


def test_one_that_is_not_finite_ends_alone() -> None:
    engine = make_engine(FakeRunner())
    bad, good = embed(engine, "what?", "bad"), embed(engine, "good", "good")
    run(engine)
    assert bad[-1].finish_reason == "error" and "not finite" in str(bad[-1].error)
    assert good[-1].finish_reason == "stop"


@pytest.mark.parametrize("depth", [1, 3])
def test_a_failed_step_ends_its_requests(depth: int) -> None:
    runner = FakeRunner(depth)
    engine = make_engine(runner)
    deltas = embed(engine, "long " * 50, "e")
    engine.step()
    runner.fail_steps = 1
    run(engine)
    assert [delta.finish_reason for delta in deltas] == ["error"] and deltas[0].embedding is None
    again = embed(engine, "again", "again")
    run(engine)
    assert again[-1].embedding is not None


@pytest.mark.parametrize("depth", [1, 3])
def test_a_cancelled_one_gives_nothing(depth: int) -> None:
    engine = make_engine(FakeRunner(depth))
    deltas = embed(engine, "long " * 50, "e")
    engine.step()
    engine.abort("e")
    run(engine)
    assert [delta.finish_reason for delta in deltas] == ["abort"] and deltas[0].embedding is None
