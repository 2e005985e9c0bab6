"""Models with recurrent layers: logits against libllama, and the same text in any company."""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path

import numpy as np
import pytest
from distance import relative

sys.path.insert(0, str(Path(__file__).parent))
from driver import Driver
from engine import answers as served
from engine.answers import BASE, Case, _run, answers
from gguf_tools import Raw, rewrite
from tiny_hybrid import tiny_hybrid
from tiny_models import libllama_logits

from backends.ggml.layers import DeviceLayers
from backends.ggml.models import FAMILIES, ModelError, read_config
from backends.ggml.stage import GgmlStage
from hetero import launch
from hetero.plan.devices import DeviceChoice
from hetero.plan.make import GUESSED
from hetero.prepare import LaunchError, prepare
from quant.gguf import open_gguf

BOUND = 2e-4  # of logits; keys and values are halfs here and float32 there
PLAIN_BOUND = 1e-3  # ggml attends with queries rounded to halfs too
VARIANTS = [
    ("qwen35", {}),
    ("qwen35", {"key_heads": 1, "value_heads": 3, "state_dim": 32, "taps": 3, "every": 3, "tied": True}),
    ("qwen35moe", {"seed": 5}),
    ("qwen35", {"n_layers": 5, "head_dim": 32, "n_rot": 32, "n_kv_heads": 1, "every": 2}),
]


class PlainStage(GgmlStage):
    """As on a device without kernels of ours."""

    def _kind(self) -> type[DeviceLayers]:
        return DeviceLayers


def token_ids(count: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 300, count)]


@pytest.fixture(
    scope="module", params=range(len(VARIANTS)), ids=[f"{a}-{i}" for i, (a, _) in enumerate(VARIANTS)]
)
def tiny(request, tmp_path_factory):
    arch, options = VARIANTS[request.param]
    path = tiny_hybrid(tmp_path_factory.mktemp("tiny") / "m.gguf", arch, **{"seed": request.param, **options})
    driver = Driver(path, max_tokens=128)
    yield path, driver
    driver.close()


def test_logits_in_any_chunks(tiny):
    path, driver = tiny
    ids = token_ids(100)
    want = libllama_logits(path, ids)
    whole = driver.logits(ids, 100)
    assert relative(whole, want) <= BOUND
    assert (whole.argmax(1) == want.argmax(1)).all()
    for chunk in (1, 7, 32):
        np.testing.assert_array_equal(driver.logits(ids, chunk, seed=chunk), whole)


def test_plain_operators(tiny):
    """In chunks, and sequences of different lengths side by side."""
    path, _ = tiny
    ids, lengths = token_ids(62), [1, 17, 40, 62]
    want = libllama_logits(path, ids)
    driver = Driver(path, max_tokens=128, kind=PlainStage)
    for chunk in (1, 7, 62):
        assert relative(driver.logits(ids, chunk, seed=chunk), want) <= PLAIN_BOUND
    tables = np.split(np.random.default_rng(7).permutation(np.arange(1, 197)), 4)
    together = driver.step([(t, 0, ids[:n]) for t, n in zip(tables, lengths, strict=True)])
    for n, got in zip(lengths, together, strict=True):
        assert relative(got, want[:n]) <= PLAIN_BOUND
    driver.close()


def test_sequences_of_different_lengths_in_one_batch(tiny):
    _, driver = tiny
    ids, lengths = token_ids(62), [1, 17, 40, 62]
    tables = np.split(np.random.default_rng(7).permutation(np.arange(1, 197)), 4)
    together = driver.step([(t, 0, ids[:n]) for t, n in zip(tables, lengths, strict=True)])
    for n, got in zip(lengths, together, strict=True):
        np.testing.assert_array_equal(got, driver.logits(ids[:n], chunk=7, seed=n))


PARTS = ("ssm_conv1d.weight", "ssm_norm.weight", "ssm_alpha.weight", "ssm_beta.weight", "attn_gate.weight")


def test_every_recurrent_family_is_here():
    assert {arch for arch, _ in VARIANTS} == {name for name, family in FAMILIES.items() if family.recurrent}


def test_what_is_refused(tmp_path):
    """Sizes that cannot be, and weights that our kernels read as they are; with the key or the tensor."""

    def refusal(metadata: dict, tensors: dict | None = None) -> str:
        path = tiny_hybrid(tmp_path / "m.gguf", metadata=metadata)
        if tensors:
            path = rewrite(path, tmp_path / "other.gguf", {}, tensors)
        with open_gguf(path) as gguf, pytest.raises(ModelError) as caught:
            read_config(gguf)
        return str(caught.value)

    for key, value in (
        ("ssm.state_size", 24),
        ("ssm.group_count", 3),
        ("ssm.time_step_rank", 0),
        ("ssm.conv_kernel", 1),
        ("ssm.inner_size", 65),
        ("full_attention_interval", 0),
    ):
        assert f"qwen35.{key.split('.')[0]}" in refusal({f"qwen35.{key}": value})
    assert "none of the 4 layers attends" in refusal({"qwen35.full_attention_interval": 9})
    assert "sections" in refusal({"qwen35.rope.dimension_sections": np.array([2, 1, 0, 1], np.int32)})
    halfs = {"blk.0.ssm_conv1d.weight": Raw("F16", (4, 128), bytes(1024))}
    assert "blk.0.ssm_conv1d.weight is F16; convolutions must be F32" in refusal({}, halfs)
    assert "attn_gate.weight" in refusal({}, {"blk.0.attn_gate.weight": Raw("F32", (64, 32), bytes(8192))})


@pytest.mark.parametrize("name", ["ssm_a", "ssm_dt.bias", *PARTS])
def test_a_part_left_out_is_noticed(tmp_path, name):
    """The comparison has teeth: without any one part of a layer the bound is exceeded by far."""
    path, ids = tiny_hybrid(tmp_path / "m.gguf"), token_ids(60)
    with open_gguf(path) as gguf:
        full = f"blk.1.{name}"
        raw = Raw("F32", gguf.tensors[full].shape, bytes(gguf.tensors[full].nbytes))
    broken = Driver(rewrite(path, tmp_path / "broken.gguf", {}, {full: raw}))
    assert relative(broken.logits(ids), libllama_logits(path, ids)) > 10 * BOUND
    broken.close()


def test_quantized_weights(tmp_path):
    """Rounding activations to 8 bits: as far from libllama as it is from itself with flash attention."""
    options = {"n_embd": 256, "n_ff": 512, "head_dim": 64, "state_dim": 64, "weight_type": "Q4_K"}
    path, ids = tiny_hybrid(tmp_path / "m.gguf", **options), token_ids(80)
    driver = Driver(path)
    got = driver.logits(ids, 80)
    want, flash = libllama_logits(path, ids), libllama_logits(path, ids, flash=True)
    print(f"ours {relative(got, want):.4f}, libllama to itself {relative(flash, want):.4f}")
    assert relative(got, want) <= max(0.05, 1.5 * relative(flash, want))
    assert (got.argmax(1) == want.argmax(1)).mean() >= 0.9
    np.testing.assert_array_equal(driver.logits(ids, 9, seed=1), got)
    driver.close()


@pytest.mark.parametrize("kind", [GgmlStage, PlainStage])
def test_states_left_in_the_middle(tmp_path, kind):
    """A step leaves states where it is told to, and is not led astray by rows behind them."""
    path, ids = tiny_hybrid(tmp_path / "m.gguf"), token_ids(60)
    want = libllama_logits(path, ids)
    driver = Driver(path, max_tokens=128, kind=kind)
    a, b, wrong = [3, 4, 5, 6], [7, 8, 9, 10], [7] * 5
    writes = [(0, 2, 11), (0, 16, 12), (0, 37, 13), (1, 1, 14)]
    first, second = driver.step([(a, 0, ids[:37] + wrong), (b, 0, ids[:1])], states=([0, 0], writes))
    assert relative(first[:37], want[:37]) <= PLAIN_BOUND and relative(second, want[:1]) <= PLAIN_BOUND
    for slot, start in ((11, 2), (12, 16), (13, 37), (12, 16)):
        (got,) = driver.step([(a, start, ids[start:])], states=([slot], [(0, 1, 15)]))
        assert relative(got, want[start:]) <= PLAIN_BOUND, f"from the state behind {start} tokens"
    (got,) = driver.step([(b, 1, ids[1:])], states=([14], []))
    assert relative(got, want[1:]) <= PLAIN_BOUND
    driver.close()


SETTINGS = dataclasses.replace(BASE, ctx=400, kv_tokens=32768, spec="off", threads=1)
OUTPUT = 24


@pytest.fixture
def plain(monkeypatch):
    """The CPU as a device without kernels of ours."""
    monkeypatch.setattr(GgmlStage, "_kind", lambda self: DeviceLayers)
    monkeypatch.setattr(DeviceChoice, "own_kernels", False)


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch):
    """How fast two devices are makes no difference here."""
    monkeypatch.setattr(served, "prepare", functools.partial(prepare, measure=GUESSED))


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    """Prompts with common beginnings of any length, and what the model answers to each of them alone."""
    path = tiny_hybrid(tmp_path_factory.mktemp("tiny") / "m.gguf", n_layers=8)
    rng, stem, prompts = np.random.default_rng(3), token_ids(150, 9), []
    for i in range(12):
        shared = int(rng.integers(0, 150)) if i % 3 else 128
        prompts.append(stem[:shared] + token_ids(int(rng.integers(1, 60)), i))
    alone, _ = answers(path, SETTINGS, prompts, 1, tokens=OUTPUT)
    assert len({tuple(a) for a in alone}) == len(prompts)
    for prompt, answer in ((prompts[1], alone[1]), (prompts[5], alone[5])):
        ids = prompt + answer
        assert libllama_logits(path, ids)[len(prompt) - 1 : -1].argmax(1).tolist() == answer
    return Case(path, prompts, alone)


@pytest.mark.parametrize("chunk", [16, 50, 512])
def test_in_company(case, chunk):
    settings = dataclasses.replace(SETTINGS, max_num_batched_tokens=chunk)
    out, stats = answers(case.path, settings, case.prompts, 8, tokens=OUTPUT)
    assert out == case.alone
    assert stats.cached_tokens > 200, "common beginnings are computed once, and left where they part"


def test_from_a_warm_cache(case):
    out, stats = answers(case.path, SETTINGS, case.prompts, 8, rounds=2, tokens=OUTPUT)
    assert out == case.alone
    again = sum((len(prompt) - 1) // 16 * 16 for prompt in case.prompts)
    assert stats.cached_tokens >= again, "a prompt that comes again is found up to its last whole block"


def test_with_preemption(case):
    settings = dataclasses.replace(SETTINGS, kv_tokens=272, ctx=256)
    out, stats = answers(case.path, settings, case.prompts, 32, tokens=OUTPUT)
    assert out == case.alone
    assert stats.preemptions > 0


@pytest.mark.parametrize("isolate", ["off", "all"])
def test_in_stages(case, isolate):
    settings = dataclasses.replace(
        SETTINGS,
        device=("CPU:threads=1", "CPU:threads=1"),
        split=(3, 5),
        isolate=isolate,
        max_num_batched_tokens=50,
    )
    out, stats = answers(case.path, settings, case.prompts, 8, tokens=OUTPUT)
    assert out == case.alone
    assert len(stats.stages) == 2 and stats.cached_tokens > 200


class Knowing:
    """A drafter that guesses right, but for every fourth token."""

    def __init__(self, answers: list[list[int]]):
        self.answers, self.right, self.wrong = answers, 0, 0

    def draft(self, due, limits, num_tokens, room):
        guesses = []
        for request, limit in zip(due, limits, strict=True):
            done = len(request.output_token_ids)
            truth = self.answers[int(request.request_id)][done : done + min(5, limit)]
            guess = [t if (done + i) % 4 else t - 1 for i, t in enumerate(truth)]
            self.right += sum(a == b for a, b in zip(guess, truth, strict=True))
            self.wrong += sum(a != b for a, b in zip(guess, truth, strict=True))
            guesses.append(guess)
        return guesses

    def read(self, requests, num_tokens):
        return


@pytest.mark.parametrize("device", [(), ("CPU:threads=1", "CPU:threads=1")])
def test_with_guesses(case, device):
    """Right ones are taken, wrong ones leave no trace in a state."""
    settings = dataclasses.replace(
        SETTINGS, model=str(case.path), max_num_seqs=8, spec="ngram", device=device
    )
    engine = launch.load(served.prepare(settings), settings, lambda *_: None)[0]._engine
    engine.speculation, engine.scheduler.drafter = None, Knowing(case.alone)
    assert _run(engine, case.prompts, 8, OUTPUT) == case.alone
    engine.check_invariants()
    assert engine.scheduler.drafter.right > 50 and engine.scheduler.drafter.wrong > 50
    assert engine.stats().steps < 3 * OUTPUT, "no guess was taken"
    engine.close()


@pytest.mark.parametrize("split", [(8,), (3, 5)])
def test_served_by_plain_operators(case, plain, split):
    """The same text but where rounding tips the scales; a stage may have recurrent layers alone."""
    settings = dataclasses.replace(
        SETTINGS,
        device=("CPU:threads=1",) * len(split),
        split=split,
        isolate="off",
        max_num_batched_tokens=50,
    )
    out, stats = answers(case.path, settings, case.prompts, 8, tokens=OUTPUT)
    assert sum(a == b for a, b in zip(out, case.alone, strict=True)) >= len(out) - 2
    assert stats.cached_tokens > 200


@pytest.mark.parametrize("kernels", ["ours", "plain"])
def test_the_plan_counts_states(case, request, kernels):
    if kernels == "plain":
        request.getfixturevalue("plain")
    settings = dataclasses.replace(SETTINGS, model=str(case.path), isolate="off", max_num_seqs=8)
    prepared = prepare(settings)
    (planned,), (stage,) = prepared.plan.stages, launch.open_stages(prepared, settings, lambda *_: None)
    held = stage.memory()
    stage.close()
    states = prepared.plan.groups[-1].num_blocks * prepared.facts.state_bytes * 6
    assert states > 8 * 6 * prepared.facts.state_bytes
    assert held["kv"] == pytest.approx(planned.kv_bytes, rel=0.05) and states < planned.kv_bytes
    assert held["compute"] <= planned.compute_bytes


def test_no_draft_model_with_states(case, smollm2_path):
    settings = dataclasses.replace(SETTINGS, model=str(case.path), spec=f"draft:{case.path}")
    with pytest.raises(LaunchError, match="cannot take guesses back"):
        prepare(settings)


def test_lower_tiers_are_left_out_and_said_so(case, tmp_path):
    settings = dataclasses.replace(SETTINGS, model=str(case.path), ram_cache=1 << 28)
    prepared = prepare(settings)
    assert not any(prepared.host.slots)
    assert any("without effect" in note for note in prepared.plan.notes)
