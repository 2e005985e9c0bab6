"""Blocks spilled to host memory and loaded again, by stages in this process and in others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isolated_tools import segments, until
from moves_tools import LENGTH, SLOTS, batch, moves, spec_of, step, there_and_back
from test_plain_operators import PlainStage
from tiny_models import tiny_model
from worker_tools import BLOCKS, Model

from backends.base import DeviceSpec
from backends.cpu.moves import copy_pieces, copy_pieces_reference
from backends.ggml.devices import Device, open_device
from backends.ggml.moves import runs
from backends.ggml.stage import GgmlStage
from hetero.batch import BlockCopy, BlockMove
from hetero.pipeline import shared_memory
from hetero.pipeline.isolated import IsolatedStage
from hetero.pipeline.runner import Runner

ONE_THREAD = DeviceSpec("CPU", threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Four layers, two KV groups: with a window and without."""
    folder = tmp_path_factory.mktemp("moves")
    shape = {"n_layers": 4, "sliding_window": 24, "sliding_window_pattern": 2}
    return Model(tiny_model(folder / "tiny.gguf", arch="gemma3", **shape), max_tokens=128)


def device(asynchronous: bool = False) -> Device:
    found = open_device(ONE_THREAD)
    found.asynchronous = asynchronous
    return found


def ours(model: Model, first: int = 0, last: int | None = None) -> GgmlStage:
    return GgmlStage(model.gguf, model.config, device(), spec_of(model, first, last))


def plain(model: Model) -> GgmlStage:
    return PlainStage(model.gguf, model.config, device(), spec_of(model))


def threaded(model: Model) -> GgmlStage:
    """Loads in a thread, as on a device that copies while it computes."""
    return PlainStage(model.gguf, model.config, device(True), spec_of(model))


def apart(model: Model, first: int = 0, last: int | None = None, **options: Any) -> IsolatedStage:
    return IsolatedStage(model.path, model.config, ONE_THREAD, spec_of(model, first, last), **options)


KINDS = {"our kernels": ours, "plain operators": plain, "in a thread": threaded}


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(model: Model, kind: str) -> None:
    stage = KINDS[kind](model)
    host = stage.host_memory
    assert host is not None and stage.memory()["host"] >= SLOTS * host.slot_bytes(0) > 0
    there_and_back(model, [stage])
    host.check_invariants()
    stage.close()


@pytest.mark.parametrize(
    ("kind", "key_type", "value_type"),
    [(GgmlStage, "fp8", "fp8"), (GgmlStage, "q8_0", "fp8"), (PlainStage, "q8_0", "f16")],
)
def test_there_and_back_in_other_formats(
    kind: type[GgmlStage], key_type: str, value_type: str, tmp_path: Path
) -> None:
    model = Model(tiny_model(tmp_path / "m.gguf", n_layers=2, head_dim=32))
    spec = spec_of(model, key_type=key_type, value_type=value_type)
    stage = kind(model.gguf, model.config, device(), spec)
    there_and_back(model, [stage])
    stage.close()


def test_through_two_stages_of_which_one_is_in_a_process_of_its_own(model: Model) -> None:
    """What this process sees of the other one's slots is what one stage alone would have in them."""
    whole, first, second = ours(model), ours(model, 0, 1), apart(model, 1)
    sizes = [[stage.host_memory.slot_bytes(g) > 0 for g in range(2)] for stage in (first, second)]
    assert sizes == [[False, True], [True, True]]  # group 0 has no window: the first layer has one
    assert second.memory()["host"] == second.host_memory.nbytes
    assert not segments(), "nothing with a name is left"
    there_and_back(model, [first, second])
    ids = list(range(5, 5 + LENGTH))
    for stages in ([whole], [first, second]):
        step(stages, batch(model, [3, 5, 7, 9, 11, 13], 0, ids))
        step(stages, batch(model, spills=moves(model, [5, 7], [2, 0])))
    for group in range(2):
        for slot in (2, 0):
            parts = [s.host_memory.view(group, slot) for s in (first, second)]
            assert np.array_equal(np.concatenate(parts), whole.host_memory.view(group, slot))
    second.host_memory.view(1, 2)[:] = second.host_memory.view(1, 0)
    step([first, second], batch(model, loads=[BlockMove(1, 20, 2)]))
    step([first, second], batch(model, spills=[BlockMove(1, 20, 4)]))
    assert np.array_equal(second.host_memory.view(1, 4), second.host_memory.view(1, 0))
    for stage in (whole, first, second):
        stage.close()
        with pytest.raises(LookupError, match="closed"):
            stage.host_memory.view(1, 0)


def test_what_moves_took_comes_with_the_result(model: Model) -> None:
    """Through the threads of a pipeline, with a step of moves alone between two that compute."""
    runner = Runner([ours(model, 0, 2), ours(model, 2)])
    for stage, host in zip(runner.backends, runner.host_memories, strict=True):
        assert host is not None and host is stage.host_memory
    ids, bytes_of = list(range(5, 25)), [sum(h.slot_bytes(g) for g in range(2)) for h in runner.host_memories]
    steps = [
        batch(model, [3, 5], 0, ids),
        batch(model, spills=moves(model, [3, 5], [4, 2])),
        batch(model, [7, 9], 0, ids[::-1], loads=moves(model, [3], [2])),
    ]
    results = []
    for one in steps:
        if runner.in_flight == runner.depth:
            results.append(runner.wait())
        runner.submit(one)
    while runner.in_flight:
        results.append(runner.wait())
    assert [r.error for r in results] == [None] * 3 and [len(r.logits) for r in results] == [20, 0, 20]
    for result, blocks in zip(results, (0, 2, 1), strict=True):
        assert [times.moved_bytes for times in result.stages] == [blocks * n for n in bytes_of]
        assert all((times.move_seconds > 0) == (blocks > 0) for times in result.stages)
    runner.close()


def test_slots_that_the_other_process_keeps_to_itself(model: Model) -> None:
    stage = apart(model, share_host=False)
    assert stage.host_memory is None and stage.memory()["host"] > 0
    there_and_back(model, [stage])
    stage.close()


def test_shared_slots_as_on_other_systems(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """In shared memory that has a name, until both ends have it."""
    monkeypatch.setattr(shared_memory, "NAMELESS", False)
    stage = apart(model)
    assert not segments()
    there_and_back(model, [stage])
    assert stage.host_memory.view(0, 0).any()
    stage.close()


@contextlib.contextmanager
def held_back(stage: GgmlStage) -> Iterator[threading.Event]:
    """Loads begin when the event is set."""
    go, move = threading.Event(), stage._mover._move

    def wait(*arguments: Any) -> None:
        assert go.wait(30)
        move(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage._mover, "_move", wait)
        yield go


def test_a_step_computes_while_blocks_are_loaded_and_ends_after_them(model: Model) -> None:
    stage, ids, done = threaded(model), list(range(5, 25)), []
    want = step([stage], batch(model, [3, 5], 0, ids))
    step([stage], batch(model, spills=moves(model, [3], [0])))
    with held_back(stage) as go:
        stage.prepare(batch(model, [3, 5], 0, ids, loads=moves(model, [20], [0])), None)

        def compute() -> None:
            done.append(stage.compute().copy())

        stage.graph_seconds, thread = 0.0, threading.Thread(target=compute)
        thread.start()
        until(lambda: stage.graph_seconds > 0)
        assert thread.is_alive(), "it has computed, and waits for the load"
        go.set()
        thread.join(30)
    assert np.array_equal(done[0], want) and stage.moved_bytes > 0
    got = step([stage], batch(model, [20, 5], 19, ids[19:]))
    assert np.array_equal(got, step([stage], batch(model, [3, 5], 19, ids[19:])))
    stage.close()


def test_a_load_that_fails_is_the_steps_error(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (threaded, plain):
        stage = kind(model)

        def fail(*arguments: Any) -> None:
            raise MemoryError("no slots")

        with monkeypatch.context() as patch, pytest.raises(MemoryError, match="no slots"):
            patch.setattr(stage._mover, "_move", fail)
            step([stage], batch(model, loads=moves(model, [20], [0])))
        there_and_back(model, [stage])
        stage.close()


OPERATION = st.tuples(
    st.sampled_from(["write", "spill", "copy", "load"]),
    st.integers(0, 1),
    st.integers(1, BLOCKS - 1),
    st.integers(0, SLOTS - 1),
    st.integers(1, BLOCKS - 1),
)


@pytest.fixture(scope="module", params=["our kernels", "in a thread"])
def stage(model: Model, request: pytest.FixtureRequest) -> Iterator[GgmlStage]:
    it = KINDS[request.param](model)
    yield it
    it.close()


@given(steps=st.lists(st.lists(OPERATION, max_size=12), max_size=8), seed=st.integers(0, 1 << 20))
@settings(max_examples=60, deadline=None)
def test_slots_hold_what_was_last_moved_to_them(stage: GgmlStage, model: Model, steps, seed: int) -> None:
    """Against dictionaries of blocks and slots; in each step spills, then copies, then loads."""
    host, rng = stage.host_memory, np.random.default_rng(seed)
    blocks: dict[tuple[int, int], bytes] = {}
    slots: dict[tuple[int, int], bytes] = {}
    for operations in steps:
        kinds: dict[str, list] = {"spill": [], "copy": [], "load": []}
        for what, group, block, slot, other in operations:
            if what == "write":  # between steps, as a disk tier does
                view = host.view(group, slot)
                view[:] = rng.integers(0, 256, len(view), np.uint8)
                slots[group, slot] = view.tobytes()
            elif what == "copy":
                kinds[what].append(BlockCopy(group, block, other))
            else:
                kinds[what].append(BlockMove(group, block, slot))
        step([stage], batch(model, spills=kinds["spill"], copies=kinds["copy"], loads=kinds["load"]))
        for m in kinds["spill"]:
            _put(slots, (m.group, m.slot), blocks.get((m.group, m.block)))
        for c in kinds["copy"]:
            _put(blocks, (c.group, c.dst), blocks.get((c.group, c.src)))
        for m in kinds["load"]:
            _put(blocks, (m.group, m.block), slots.get((m.group, m.slot)))
        for (group, slot), content in slots.items():
            assert host.view(group, slot).tobytes() == content
    host.check_invariants()


def _put(where: dict[tuple[int, int], bytes], key: tuple[int, int], content: bytes | None) -> None:
    """Content that nobody knows is nothing."""
    if content is None:
        where.pop(key, None)
    else:
        where[key] = content


@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    moved=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), max_size=10),
    spill=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=100, deadline=None)
def test_the_kernel_copies_as_its_reference_does(sizes, moved, spill: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pools = [rng.integers(0, 256, (8, size), np.uint8) for size in sizes]
    slots = rng.integers(0, 256, (6, sum(sizes)), np.uint8)
    ours, arena = [pool.copy() for pool in pools], slots.copy()
    blocks = np.array([block for block, _ in moved], np.int64)
    addresses = np.array([arena[slot].ctypes.data for _, slot in moved], np.int64)
    where = np.array([pool.ctypes.data for pool in ours], np.int64)
    copy_pieces(where, np.array(sizes, np.int64), blocks, addresses, spill)
    copy_pieces_reference(pools, blocks, [slots[slot] for _, slot in moved], spill)
    assert np.array_equal(arena, slots)
    assert all(np.array_equal(a, b) for a, b in zip(ours, pools, strict=True))


def test_moves_that_lie_side_by_side_go_together() -> None:
    at = [(0, 5, 2), (0, 6, 3), (0, 4, 1), (0, 3, 1), (1, 3, 2), (1, 9, 7), (1, 8, 6), (1, 7, 5), (1, 11, 8)]
    assert runs(BlockMove(*m) for m in at) == [
        (0, 4, 1, 3), (0, 3, 1, 1), (1, 3, 2, 1), (1, 7, 5, 3), (1, 11, 8, 1)
    ]  # fmt: skip
    assert runs([]) == []
