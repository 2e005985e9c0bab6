"""Each pair of formats of keys and values through a whole model, against numpy, libllama and itself."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from attention_tools import decoded, encoded
from distance import relative
from engine.answers import BASE, answers, make_prompts
from engine.driver import BLOCK, Driver
from engine.reference import Rounded, forward
from tiny_models import libllama_logits, tiny_model

from backends.ggml.models import ModelError, read_config
from backends.kv_format import KV_TYPES, row_bytes
from hetero.batch import BlockCopy
from hetero.kv_types import parse_kv_types
from quant.gguf import open_gguf
from quant.types import TYPE_IDS

PAIRS = list(itertools.product(KV_TYPES, KV_TYPES))
# Of norms, against the reference with keys and values through the same encoders. Roundings that fall to the
# other side are rare, but a step of fp8 is 2^-4 of a value.
BOUND = 4e-4
# libllama also rounds the queries to q8_0 there. What it changes by that, and by halfs, is most of this.
LIBLLAMA_BOUND = 1e-2
IDS = [int(i) for i in np.random.default_rng(1).integers(3, 300, 120)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows in two of three layers, heads of two blocks of q8_0."""
    path = tmp_path_factory.mktemp("tiny") / "m.gguf"
    options = {"n_layers": 3, "sliding_window": 40, "sliding_window_pattern": 3}
    return tiny_model(path, "gemma3", n_heads=3, n_kv_heads=1, head_dim=64, **options)


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def driver(path: Path, request: pytest.FixtureRequest):
    driver = Driver(path, num_blocks=40, max_tokens=128, threads=1, kv_types=request.param)
    driver.kept = request.param
    yield driver
    driver.close()


def through(kv_type: str) -> Rounded:
    def kept(x: np.ndarray) -> np.ndarray:
        rows = x.reshape(-1, x.shape[-1]).astype(np.float32)
        return decoded(kv_type, *encoded(kv_type, rows)).reshape(x.shape).astype(np.float64)

    return kept


@pytest.fixture(scope="module")
def exact(path: Path) -> np.ndarray:
    """Logits of IDS with keys and values as they are."""
    with open_gguf(path) as file:
        return forward(file, read_config(file), IDS)


def test_logits_are_those_of_the_formats(driver: Driver, exact: np.ndarray):
    """In chunks of any size, in company, through copied blocks: the same bits, and numpy's numbers."""
    got = driver.logits(IDS, 50)
    kept = (through(driver.kept[0]), through(driver.kept[1]))
    want = forward(driver.gguf, driver.config, IDS, kept=kept)
    changed = relative(want, exact)
    print(f"{driver.kept}: {relative(got, want):.1e} from numpy, the formats change {changed:.1e}")
    assert relative(got, want) <= BOUND
    assert driver.kept == ("f16", "f16") or changed > 3 * BOUND
    np.testing.assert_array_equal(got, driver.logits(IDS, 7, seed=1))
    tables, lengths = np.split(np.random.default_rng(2).permutation(np.arange(1, 31)), 3), (1, 31, 62)
    parts = driver.step([(t, 0, IDS[:n]) for t, n in zip(tables, lengths, strict=True)])
    for n, part in zip(lengths, parts, strict=True):
        np.testing.assert_array_equal(part, got[:n])
    copies = [BlockCopy(g, int(tables[2][0]), 35) for g in range(driver.num_groups)]
    other = [35, *tables[2][1:]]
    (part,) = driver.step([(other, 62, IDS[62:])], copies)
    np.testing.assert_array_equal(part, got[62:])


def test_pools_take_what_the_formats_take(driver: Driver):
    token = sum(row_bytes(t, 64) for t in driver.kept)
    want = driver.config.n_layer * driver.num_blocks * BLOCK * token
    assert want <= driver.stage.memory()["kv"] <= want + 4096


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_q8_0_is_libllamas(arch: str, tmp_path: Path):
    path = tiny_model(tmp_path / "m.gguf", arch, seed=4, head_dim=32)
    want = libllama_logits(path, IDS, flash=True, kv_type=TYPE_IDS["Q8_0"])
    distances = {}
    for kv_type in KV_TYPES:
        driver = Driver(path, num_blocks=10, max_tokens=128, threads=1, kv_types=(kv_type, kv_type))
        distances[kv_type] = relative(driver.logits(IDS, 60), want)
        driver.close()
    print(distances)
    assert distances["q8_0"] <= LIBLLAMA_BOUND < distances["fp8"]
    assert distances["q8_0"] < 0.9 * distances["f16"]


def test_heads_that_a_format_cannot_hold_are_named(tmp_path: Path):
    path = tiny_model(tmp_path / "m.gguf", head_dim=16)
    with pytest.raises(ModelError, match="q8_0 needs heads of a multiple of 32 values, not 16"):
        Driver(path, kv_types=("f16", "q8_0"))


@pytest.mark.parametrize("kv_type", ["fp8", "q8_0", "k=q8_0,v=fp8"])
def test_greedy_text_is_the_same_in_company_and_from_a_warm_cache(path: Path, kv_type: str):
    settings = dataclasses.replace(BASE, kv_type=parse_kv_types(kv_type), kv_tokens=2048, ctx=512, threads=1)
    prompts = make_prompts(path, 10, 120)
    alone, _ = answers(path, settings, prompts, 1, tokens=20)
    chunked = dataclasses.replace(settings, max_num_batched_tokens=32)
    assert answers(path, chunked, prompts, 8, tokens=20)[0] == alone
    out, stats = answers(path, settings, prompts, 4, rounds=2, tokens=20)
    assert out == alone
    assert stats.cached_tokens > sum(map(len, prompts)) // 2
