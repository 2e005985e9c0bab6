"""Every family cut into stages of one layer, and observed for an importance matrix."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from driver import BLOCK, Driver
from family_tools import CONTEXT, PlainStage, relative
from test_families import VARIANTS
from tiny_experts import LAYERS, Sizes, tiny_experts
from tiny_families import tiny_family

from backends.cpu.observe import ObservingStage
from backends.ggml.devices import open_device
from backends.ggml.models.tensors import layer_tensors
from backends.ggml.stage import GgmlStage
from backends.ggml.weights import is_matrix
from hetero.batch import Batch

IDS = [int(i) for i in np.random.default_rng(0).integers(3, 300, 40)]
NAMES = [*VARIANTS, *(f"{name} experts" for name in LAYERS)]
SAME = 1e-6  # of norms: the same operators on the same numbers


@pytest.fixture(scope="module", params=[n.replace(" ", "-") for n in NAMES])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stages") / "m.gguf"
    name = request.param.replace("-", " ")
    if name not in VARIANTS:
        return tiny_experts(path, request.param.removesuffix("-experts"), sizes=Sizes(experts=4, used=2))
    variant = VARIANTS[name]
    return tiny_family(path, variant.arch, variant.metadata, **variant.options)


def one_sequence(groups: int, logits: int) -> Batch:
    """All of IDS in the first blocks; the first `logits` rows are wanted."""
    positions = np.arange(len(IDS), dtype=np.int32)
    table = np.arange(1, 2 + len(IDS) // BLOCK, dtype=np.int32)
    return Batch(
        step_id=0,
        input_ids=np.array(IDS, np.int32),
        positions=positions,
        slot_mapping=[(table[positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32)] * groups,
        block_tables=[table[None]] * groups,
        context_lens=np.array([len(IDS)], np.int32),
        cu_seqlens_q=np.array([0, len(IDS)], np.int32),
        logits_rows=np.arange(logits, dtype=np.int32),
        copies=[],
    )


@pytest.mark.parametrize("kind", [GgmlStage, PlainStage])
def test_stages_of_one_layer_each(path: Path, kind: type[GgmlStage]):
    """Also where a stage rotates nothing, or has another window than the next. Layers that attend the same
    keys and values stay together."""
    driver = Driver(path, num_blocks=8, max_tokens=64, threads=1, kind=kind, max_context=CONTEXT)
    batch, rows = one_sequence(driver.num_groups, len(IDS)), None
    whole, n_layer = driver.stage.spec, driver.config.n_layer
    last_cut = driver.config.last_cut
    for layer in range(last_cut + 1):
        end = n_layer if layer == last_cut else layer + 1
        group_of = {i: whole.group_of[i] for i in range(layer, end)}
        spec = replace(whole, first=layer, last=end, group_of=group_of)
        stage = kind(driver.gguf, driver.config, open_device("CPU", 1), spec)
        stage.prepare(batch, rows)
        rows = stage.compute().copy()
        stage.close()
    want = driver.logits(IDS, chunk=len(IDS))
    driver.close()
    assert rows is not None and relative(rows, want) <= SAME


def test_each_matrix_is_observed(path: Path):
    driver = Driver(path, num_blocks=8, max_tokens=64, threads=1, kind=ObservingStage)
    driver.stage.prepare(one_sequence(driver.num_groups, logits=0), None)
    driver.stage.compute()
    assert isinstance(driver.stage, ObservingStage)
    driver.stage.check_invariants()
    names = [n for i in range(driver.config.n_layer) for n in layer_tensors(driver.config, i)]
    infos = [info for info in map(driver.gguf.tensors.get, names) if info and is_matrix(info)]
    want = {info.name: info.shape[0] for info in infos}
    assert {name: sums.shape[-1] for name, sums in driver.stage.sums.items()} == want
    driver.close()
