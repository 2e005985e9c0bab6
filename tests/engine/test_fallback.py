"""Models that only libllama computes, behind the same scheduler: several requests at once, each with the text
that it has alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from gguf_tools import rewrite, split_gguf
from llama_models import FAMILIES
from tiny_models import libllama_logits, tiny_model

from backends.ggml.stage import StageSpec
from backends.llama.config import read_llama_config
from backends.llama.spec import LlamaSpec
from backends.llama.stage import LlamaStage, open_stage
from hetero import launch
from hetero.batch import Batch
from hetero.commands import package
from hetero.engine import Engine
from hetero.models import resolve
from hetero.pipeline.runner import Runner
from hetero.prepare import LaunchError, prepare
from hetero.request import FinishReason, OutputDelta, Request
from hetero.sampling.params import SamplingParams
from hetero.settings import Settings
from quant.gguf import open_gguf
from quant.one_file import Footer

BLOCKS, MAX_TOKENS = 64, 64
STATES = {"mamba2", "rwkv7", "lfm2"}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param](tmp_path_factory.mktemp("fallback") / f"{request.param}.gguf")


def stage_of(path: Path) -> LlamaStage:
    gguf = open_gguf(path)
    config = read_llama_config(gguf)
    groups = dict.fromkeys(range(config.n_layer), 0)
    spec = StageSpec(0, config.n_layer, groups, (BLOCKS,), MAX_TOKENS, MAX_TOKENS)
    return open_stage(gguf, spec, LlamaSpec((), (), 8, BLOCKS * 16, 2, config.keeps_prefixes))


class Sequence:
    """A sequence of random tokens in blocks of its own, computed chunk by chunk."""

    def __init__(self, rng: random.Random, number: int, length: int):
        self.tokens = [rng.randrange(3, 300) for _ in range(length)]
        self.blocks = [1 + 8 * number + i for i in range(8)]
        self.done = 0


def batch_of(parts: list[tuple[Sequence, int]]) -> Batch:
    """The next tokens of each, all of whose logits are wanted."""
    ids, positions, slots, ends = [], [], [], [0]
    for sequence, count in parts:
        places = range(sequence.done, sequence.done + count)
        ids += sequence.tokens[places.start : places.stop]
        positions += places
        slots += [16 * sequence.blocks[p // 16] + p % 16 for p in places]
        ends.append(len(ids))
        sequence.done += count
    array = lambda values: np.array(values, np.int32)  # noqa: E731
    return Batch(
        0,
        array(ids),
        array(positions),
        [array(slots)],
        [array([s.blocks for s, _ in parts])],
        array([s.done for s, _ in parts]),
        array(ends),
        np.arange(len(ids), dtype=np.int32),
        [],
    )


def test_logits_are_libllamas(model: Path) -> None:
    """Sequences of different lengths, in chunks that cut through them, beside each other."""
    rng = random.Random(3)
    sequences = [Sequence(rng, number, length) for number, length in enumerate((5, 33, 60, 17))]
    rows: dict[int, list[np.ndarray]] = {id(s): [] for s in sequences}
    stage = stage_of(model)
    while busy := [s for s in sequences if s.done < len(s.tokens)]:
        parts = [(s, min(rng.randint(1, 16), len(s.tokens) - s.done)) for s in busy]
        stage.prepare(batch_of(parts), None)
        logits = stage.compute()
        for sequence, count in parts:
            rows[id(sequence)].append(logits[:count].copy())
            logits = logits[count:]
    stage.close()
    assert stage.counters() == {"recomputed_tokens": 0}
    for sequence in sequences:
        expected = libllama_logits(model, sequence.tokens, flash=True)
        found = np.concatenate(rows[id(sequence)])
        assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()
        assert (found.argmax(1) == expected.argmax(1)).mean() > 0.97


def test_a_sequence_that_was_given_up_is_computed_again(model: Path) -> None:
    rng = random.Random(4)
    stage, one = stage_of(model), Sequence(rng, 0, 40)
    stage.prepare(batch_of([(one, 30)]), None)
    stage.compute()
    stage.sequences.begin_step()
    assert stage.sequences.give_up(8) == 1
    stage.prepare(batch_of([(one, 10)]), None)
    found = stage.compute()
    assert stage.counters() == {"recomputed_tokens": 30}
    stage.close()
    expected = libllama_logits(model, one.tokens, flash=True)[30:]
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()


class Served:
    """An engine that is stepped by hand."""

    def __init__(self, path: Path, **settings: object):
        chosen = Settings(model=str(path), threads=2, max_num_seqs=6, kv_tokens=1024, **settings)  # type: ignore[arg-type]
        self.engine: Engine = launch.load(prepare(chosen), chosen, lambda *_: None)[0]._engine
        self.deltas: dict[str, list[OutputDelta]] = {}

    def ask(self, name: str, prompt: list[int], max_tokens: int = 24) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.deltas[name] = []
        self.engine.add(Request(name, prompt, params), self.deltas[name].append)

    def finish(self) -> None:
        while self.engine.step():
            pass
        self.engine.check_invariants()

    def tokens(self, name: str) -> list[int]:
        last = self.deltas[name][-1]
        assert last.finish_reason is FinishReason.LENGTH, last
        return [token for delta in self.deltas[name] for token in delta.token_ids]


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    opened: list[Served] = []

    def start(path: Path, **settings: object) -> Served:
        opened.append(Served(path, **settings))
        return opened[-1]

    yield start
    for served in opened:
        served.engine.close()


def assert_greedy(path: Path, prompt: list[int], answer: list[int]) -> None:
    """Each token is the one that libllama alone finds the likeliest behind those before it."""
    assert len(answer) == 24
    logits = libllama_logits(path, prompt + answer, flash=True)
    assert logits.argmax(axis=1)[len(prompt) - 1 : -1].tolist() == answer


def test_concurrent_requests_have_the_text_of_libllama(model: Path, serve: Callable[..., Served]) -> None:
    """Some begin alike, one repeats another."""
    served, rng = serve(model), random.Random(7)
    common = [rng.randrange(3, 300) for _ in range(40)]
    begins = {str(n): common[:length] for n, length in enumerate((0, 17, 40, 40, 17))}
    prompts = {name: [*begin, *(rng.randrange(3, 300) for _ in range(9))] for name, begin in begins.items()}
    prompts["again"] = prompts["3"]
    for name, prompt in prompts.items():
        served.ask(name, prompt)
        served.engine.step()
    served.finish()
    for name, prompt in prompts.items():
        assert_greedy(model, prompt, served.tokens(name))
    served.ask("later", prompts["3"])
    served.finish()
    assert served.tokens("later") == served.tokens("3")
    cached = served.deltas["later"][-1].num_cached_tokens
    assert cached == (0 if model.stem in STATES else len(prompts["3"]) - 1)
    (counters,) = served.engine.runner.counters
    assert counters["recomputed_tokens"] == 0


def test_the_server_outlives_libllama(tmp_path: Path, serve: Callable[..., Served]) -> None:
    served = serve(FAMILIES["stablelm"](tmp_path / "m.gguf"))
    served.ask("before", [5, 6, 7])
    served.finish()
    (child,) = [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]
    served.ask("lost", [5, 6, 7], 400)
    served.engine.step()
    child.kill()
    served.finish()
    assert served.deltas["lost"][-1].finish_reason is FinishReason.ERROR
    while served.engine.runner.unavailable is not None:
        served.engine.step()
    served.ask("after", [5, 6, 7])
    served.finish()
    assert served.tokens("after") == served.tokens("before")


def test_a_native_family_says_the_same_through_libllama(tmp_path: Path, serve: Callable[..., Served]) -> None:
    path = tiny_model(tmp_path / "llama.gguf", seed=5)
    ours, theirs = serve(path), serve(path, engine="llama", isolate="off")
    assert isinstance(ours.engine.runner, Runner) and isinstance(theirs.engine.runner, Runner)
    assert not isinstance(ours.engine.runner.backends[0], LlamaStage)
    assert isinstance(theirs.engine.runner.backends[0], LlamaStage)
    for served in (ours, theirs):
        for n in range(3):
            served.ask(str(n), [10 + n, 20, 30, 40 + n])
        served.finish()
    for n in range(3):
        assert ours.tokens(str(n)) == theirs.tokens(str(n))


@pytest.mark.parametrize("isolate", ["auto", "off"])
def test_a_damaged_model_is_one_line(tmp_path: Path, serve: Callable[..., Served], isolate: str) -> None:
    """Where libllama misses a tensor: the file, the tensor, and what to look at."""
    whole = FAMILIES["mpt"](tmp_path / "whole.gguf")
    path = rewrite(whole, tmp_path / "cut.gguf", {}, {"blk.1.ffn_up.weight": None})
    with pytest.raises(LaunchError) as caught:
        serve(path, isolate=isolate)
    line = str(caught.value)
    assert line.startswith("cut.gguf: ") and "blk.1.ffn_up.weight" in line and "\n" not in line
    assert line.endswith("; is the file whole?")


def test_a_model_in_several_files(tmp_path: Path, serve: Callable[..., Served]) -> None:
    whole = FAMILIES["mpt"](tmp_path / "whole.gguf")
    first, *_ = split_gguf(whole, tmp_path / "part", 3)
    served = serve(first, isolate="off")
    served.ask("one", [5, 6, 7])
    served.finish()
    assert_greedy(whole, [5, 6, 7], served.tokens("one"))


def test_a_model_inside_an_executable(tmp_path: Path, serve: Callable[..., Served]) -> None:
    whole = FAMILIES["stablelm"](tmp_path / "whole.gguf")
    base, out = tmp_path / "base", tmp_path / "office"
    base.write_bytes(b"MZ" + bytes(98) + Footer(4, 96, 1 << 20, 100, 0, b"0123456789abcdef").packed())
    package.write(base, out, {}, resolve(str(whole)))
    served = serve(out)
    served.ask("one", [5, 6, 7])
    served.finish()
    assert_greedy(whole, [5, 6, 7], served.tokens("one"))
