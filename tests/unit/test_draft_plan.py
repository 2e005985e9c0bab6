"""Where a draft model goes, what it takes, and which ones are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tiny_models import bpe_vocab, tiny_model

from backends.base import DeviceInfo
from backends.ggml.models.config import read_config
from hetero.plan import devices
from hetero.plan.draft import DraftPlan, plan_with_draft, vocabulary_difference
from hetero.plan.make import GUESSED, PlanError, Planned, place_of, plan_model
from hetero.settings import Settings
from hetero.spec_setting import Spec, parse_spec
from quant.gguf import GGUFFile, open_gguf

GIB = 1 << 30
CPU = DeviceInfo("CPU", "cpu", "a processor", 64 * GIB, 48 * GIB, "CPU", "CPU")
GPU = DeviceInfo("CUDA0", "gpu", "a card", 8 * GIB, 6 * GIB, "0000:0a:00.0", "CUDA")
SETTINGS = Settings(max_num_seqs=4, ctx=256, threads=1)


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("main") / "main.gguf", n_layers=4)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("small") / "small.gguf", n_layers=1, seed=1)


def planned(
    main: Path, small: Path, there: list[DeviceInfo], used: tuple[str, ...], **changes
) -> tuple[DraftPlan | None, tuple[devices.DeviceChoice, ...], Planned]:
    settings = dataclasses.replace(SETTINGS, **{"spec": f"draft:{small}", **changes})
    gguf = open_gguf(main)
    config, choices = read_config(gguf), devices.choose(used, 1, there)

    def plan_main(choices) -> Planned:
        return plan_model(gguf, config, choices, settings, None, lambda *_: None, GUESSED)

    return plan_with_draft(settings, gguf, choices, there, plan_main)


def test_it_sits_where_the_model_does_and_takes_its_memory_first(main, small) -> None:
    draft, rest, made = planned(main, small, [CPU, GPU], ("CUDA0",))
    assert draft is not None and draft.choice.device == GPU
    assert rest[0].device.free_bytes == GPU.free_bytes - draft.stage.total_bytes
    assert made.plan.stages[0].free_bytes == rest[0].device.free_bytes
    assert draft.planned.plan.kv_tokens == made.plan.kv_tokens == 4 * 256
    assert draft.planned.plan.max_model_len == 256


@pytest.mark.parametrize(("wanted", "device"), [("CPU", "CPU"), ("CUDA0", "CUDA0"), (None, "CUDA0")])
def test_it_sits_where_the_user_says(main, small, wanted, device) -> None:
    used = ("CPU", "CUDA0")
    draft, rest, _ = planned(main, small, [CPU, GPU], used, spec_device=wanted, split=(2, 2))
    assert draft is not None and draft.choice.device.name == device
    assert [c.device.free_bytes < d.free_bytes for c, d in zip(rest, (CPU, GPU), strict=True)] == [
        name == device for name in used
    ]


def test_a_full_card_leaves_it_to_the_cpu(main, small) -> None:
    card = dataclasses.replace(GPU, free_bytes=0)
    _, _, alone = planned(main, small, [CPU, GPU], ("CUDA0",), spec="ngram")
    needed = alone.plan.stages[0].total_bytes
    card = dataclasses.replace(GPU, free_bytes=int(1.01 * needed / 0.9))
    draft, rest, made = planned(main, small, [CPU, card], ("CUDA0",), kv_tokens=alone.plan.kv_tokens)
    assert draft is not None and draft.choice.device == CPU and draft.choice.threads == 1
    assert rest[0].device == card and made.plan.fits
    assert place_of(draft.choice, "").memory != place_of(rest[0], "").memory


def test_one_that_fits_nowhere_is_one_line(main, small) -> None:
    tight = dataclasses.replace(CPU, free_bytes=1 << 20)
    with pytest.raises(PlanError, match=r"--spec draft:.*not enough memory on CPU"):
        planned(main, small, [tight], ("CPU",))


def test_its_contexts_are_as_long_as_it_can(main, tmp_path) -> None:
    short = tiny_model(tmp_path / "short.gguf", n_layers=1, n_ctx=128)
    draft, _, made = planned(main, short, [CPU], ("CPU",))
    assert draft is not None and draft.planned.plan.max_model_len == 128 < made.plan.max_model_len


def vocabulary(change) -> dict:
    values = bpe_vocab()
    change(values)
    return values


def another_token(values: dict) -> None:
    values["tokenizer.ggml.tokens"] = [*values["tokenizer.ggml.tokens"][:-1], "zzz"]


def another_end(values: dict) -> None:
    values["tokenizer.ggml.eos_token_id"] = 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (another_token, "token 310 is 'zzz', not 'ing'"),
        (another_end, "tokenizer.ggml.eos_token_id is 0, not 2"),
        (lambda values: None, ""),
    ],
)
def test_vocabularies_are_compared(main, tmp_path, change, text) -> None:
    other = tiny_model(tmp_path / "other.gguf", n_layers=1, metadata=vocabulary(change))
    ours, theirs = open_gguf(main), open_gguf(other)
    assert isinstance(ours, GGUFFile)
    assert vocabulary_difference(ours, theirs) == text
    if text:
        with pytest.raises(PlanError, match=f"draft:.*vocabulary is not the model's: {text}"):
            planned(main, other, [CPU], ("CPU",))


def test_a_shorter_vocabulary_is_refused(main, tmp_path) -> None:
    other = tiny_model(tmp_path / "gemma.gguf", "gemma3", n_layers=1)
    with pytest.raises(PlanError, match="model is llama, not gpt2"):
        planned(main, other, [CPU], ("CPU",))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"spec": "draft:/no/such.gguf"}, r"--spec draft:/no/such\.gguf: .*no such file"),
        ({"spec_device": "CUDA7"}, r"--spec-device CUDA7: no such device"),
        ({"spec_device": "CPU:threads=x"}, r"--spec-device CPU:threads=x: the only option"),
    ],
)
def test_what_cannot_be_is_one_line(main, small, changes, text) -> None:
    with pytest.raises(PlanError, match=text) as caught:
        planned(main, small, [CPU], ("CPU",), **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("off", Spec("off")),
        ("ngram", Spec("ngram")),
        ("draft:a,b.gguf", Spec("store", "a,b.gguf")),
        ("ngram,draft:C:\\m.gguf", Spec("ngram", "C:\\m.gguf")),
        ("store,draft:m", Spec("store", "m")),
    ],
)
def test_settings(text, spec) -> None:
    assert parse_spec(text) == spec


@pytest.mark.parametrize("text", ["", "draft", "draft:", "off,draft:m", "ngram,store", "ngrams"])
def test_bad_settings(text) -> None:
    with pytest.raises(ValueError, match="is not one of off, ngram, store, draft:MODEL"):
        parse_spec(text)
