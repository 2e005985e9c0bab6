"""Embeddings from a whole engine: as libllama pools them, and the same bits however a text is computed."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from tiny_hybrid import tiny_hybrid
from tiny_models import tiny_model

from hetero import launch
from hetero.embedding import Pool, pooling_of
from hetero.engine import Engine
from hetero.plan import devices
from hetero.prepare import prepare
from hetero.request import OutputDelta, Request
from hetero.sampling.params import SamplingParams
from hetero.settings import Settings

KINDS = {"mean": 1, "cls": 2, "last": 3}  # enum llama_pooling_type
SMALL = Settings(ctx=512, kv_tokens=2048, max_num_seqs=8, device=("CPU:threads=1",), isolate="none")
RNG = np.random.default_rng(3)
TEXTS = [RNG.integers(3, 300, n).tolist() for n in (1, 5, 40, 200)]
TEXTS.append(TEXTS[3][:100] + TEXTS[2])  # begins as another does


def by_libllama(path: Path, ids: Sequence[int], kind: str) -> np.ndarray:
    """libllama's own pooled vector, float32 [n_embd], not normalised. Its cache is F32."""
    quiet = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    model_params, params = llama.llama_model_default_params(), llama.llama_context_default_params()
    model_params.use_extra_bufts, model_params.n_gpu_layers = False, 0
    model = llama.llama_model_load_from_file(str(path).encode(), model_params)
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = params.flash_attn_type = 0
    params.embeddings, params.pooling_type = True, KINDS[kind]
    context = llama.llama_init_from_model(model, params)
    tokens = (llama.llama_token * len(ids))(*ids)
    try:
        assert llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(ids))) == 0
        found = llama.llama_get_embeddings_seq(context, 0)
        return np.ctypeslib.as_array(found, (llama.llama_model_n_embd(model),)).copy()
    finally:
        llama.llama_free(context)
        llama.llama_model_free(model)


def embedded(
    path: Path, settings: Settings, texts: Sequence[list[int]], kind: str = "mean", answers: int = 0
) -> tuple[list[list[float]], int]:
    """Vectors of all texts, which come at once, among so many answers; and preemptions. All is checked."""
    settings = dataclasses.replace(settings, model=str(path))
    engine = launch.load(prepare(settings, _ignore), settings, _ignore)[0]._engine
    vectors: dict[int, list[float] | None] = {}
    try:
        for i in range(answers):
            params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
            engine.add(Request(f"answer{i}", TEXTS[3][i : i + 60], params), lambda delta: None)
        for i, text in enumerate(texts):
            request = Request(f"{i}", list(text), SamplingParams(max_tokens=1), pooling=kind)
            engine.add(request, _sink(vectors, i))
        _run(engine)
        stats = engine.stats()
        assert all(free == total for total, free in stats.kv_blocks), "blocks leaked"
        assert stats.generated_tokens == 100 * answers
    finally:
        engine.close()
    return [vectors[i] or [] for i in range(len(texts))], stats.preemptions


def _sink(vectors: dict[int, list[float] | None], i: int) -> Callable[[OutputDelta], None]:
    def sink(delta: OutputDelta) -> None:
        assert i not in vectors and delta.finish_reason == "stop" and not delta.token_ids
        vectors[i] = delta.embedding

    return sink


def _run(engine: Engine) -> None:
    while engine.step():
        pass
    engine.check_invariants()


def _ignore(*_: object) -> None:
    return


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    around = devices.Around(cores=lambda: (), usable_cores=lambda: 8)
    monkeypatch.setattr(devices, "Around", lambda: around)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("embeddings") / "tiny.gguf", n_layers=3)


@pytest.fixture(scope="module")
def alone(tiny: Path) -> list[list[float]]:
    """Each text by itself, in one step."""
    settings = dataclasses.replace(SMALL, max_num_seqs=1)
    return embedded(tiny, settings, TEXTS)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_libllamas(tiny: Path, kind: str) -> None:
    for text, got in zip(TEXTS, embedded(tiny, SMALL, TEXTS, kind)[0], strict=True):
        want = by_libllama(tiny, text, kind)
        want = want / np.linalg.norm(want)
        assert np.linalg.norm(np.array(got) - want) < 1e-3
        assert abs(np.linalg.norm(got) - 1) < 1e-6


def test_recurrent_layers(tmp_path: Path) -> None:
    path = tiny_hybrid(tmp_path / "hybrid.gguf")
    for text, got in zip(TEXTS, embedded(path, SMALL, TEXTS, answers=2)[0], strict=True):
        want = by_libllama(path, text, "mean")
        assert np.linalg.norm(np.array(got) - want / np.linalg.norm(want)) < 1e-3


def test_a_real_model(smollm2_path: Path) -> None:
    text = [int(i) for i in np.random.default_rng(1).integers(20, 40000, 70)]
    got, want = embedded(smollm2_path, SMALL, [text])[0][0], by_libllama(smollm2_path, text, "mean")
    assert np.dot(got, want) / np.linalg.norm(want) > 0.999


WAYS = {
    "together": {},
    "in chunks": {"max_num_batched_tokens": 24},
    "two stages": {"device": ("CPU:threads=1",) * 2, "split": (1, 2), "max_num_batched_tokens": 64},
    "in processes": {"device": ("CPU:threads=1",) * 2, "split": (2, 1), "isolate": "all"},
    "in its process": {"isolate": "all", "max_num_batched_tokens": 48},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_in_any_way(tiny: Path, alone: list[list[float]], way: str) -> None:
    settings = dataclasses.replace(SMALL, **WAYS[way])
    assert embedded(tiny, settings, TEXTS, answers=4)[0] == alone


def test_the_same_bits_after_preemption(tiny: Path, alone: list[list[float]]) -> None:
    settings = dataclasses.replace(SMALL, kv_tokens=512, ctx=384, max_num_batched_tokens=48)
    found, preemptions = embedded(tiny, settings, TEXTS * 3, answers=6)
    assert found == alone * 3 and preemptions > 0


def test_the_last_row_may_rest_on_what_is_cached(tiny: Path) -> None:
    text = TEXTS[3]
    first, second = embedded(tiny, dataclasses.replace(SMALL, max_num_seqs=1), [text, text], "last")[0]
    assert first == second


@pytest.mark.parametrize("kind", KINDS)
def test_pooling_starts_again_with_the_text(kind: str) -> None:
    rows = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    pool, cut = Pool(kind), Pool(kind)
    pool.add(0, rows)
    for start, end in ((0, 4), (0, 2), (2, 3), (3, 9)):
        cut.add(start, rows[start:end])
    assert pool.result() == cut.result()
    row = {"mean": rows.astype(np.float64).mean(0), "cls": rows[0], "last": rows[-1]}[kind]
    assert np.allclose(pool.result(), row / np.linalg.norm(row))
    pool.add(0, np.full((2, 4), np.nan, np.float32))
    with pytest.raises(ValueError, match="not finite"):
        pool.result()
    pool.add(0, np.zeros((2, 4), np.float32))
    assert pool.result() == [0.0] * 4


def test_pooling_is_what_the_file_says() -> None:
    wanted = {None: "mean", 0: "mean", 1: "mean", 2: "cls", 3: "last", 4: None}  # 4: it ranks texts
    for value, kind in wanted.items():
        metadata = {"general.architecture": "llama", "llama.pooling_type": value}
        if value is None:
            del metadata["llama.pooling_type"]
        assert pooling_of(metadata) == kind
