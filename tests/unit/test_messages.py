"""What messages say about stages and steps: what goes in comes out, and what cannot be right is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from backends.base import DeviceSpec
from backends.ggml.stage import StageSpec
from hetero.batch import BlockCopy, BlockMove
from hetero.pipeline import messages
from hetero.pipeline.channel import Kind, Message, WireError, payload_bytes

SPEC = StageSpec(1, 3, {1: 0, 2: 1}, (5, 7), max_tokens=8, max_logits=4, depth=2, value_type="q8_0")


def test_specs_travel() -> None:
    device = DeviceSpec("CPU", "x", threads=3, cores=(1, 2), endpoint="h:1")
    header = json.loads(json.dumps(messages.open_header("m.gguf", device, SPEC, 64)))
    assert messages.read_device(header) == device and messages.read_stage(header) == SPEC
    for part, changed in (
        ("stage", header["stage"] | {"first": -1}),
        ("stage", header["stage"] | {"more": 1}),
        ("stage", header["stage"] | {"group_of": [[1]]}),
        ("stage", header["stage"] | {"key_type": "f8"}),
        ("stage", header["stage"] | {"value_type": None}),
        ("stage", {"first": 0}),
        ("stage", None),
        ("device", {"threads": 1}),
        ("device", header["device"] | {"pointer": 1}),
    ):
        with pytest.raises(WireError):
            messages.read_stage(header | {part: changed})
            messages.read_device(header | {part: changed})


HIDDEN = np.random.default_rng(0).random((4, 64), np.float32)


def batch() -> messages.WireBatch:
    """Two sequences of 3 and 1 tokens at positions 14 to 16 and 0."""
    tables = [np.array([[1, 2], [3, 0]], np.int32), np.array([[6, 5], [4, 0]], np.int32)]
    return messages.WireBatch(
        input_ids=np.array([5, 6, 7, 8], np.int32),
        positions=np.array([14, 15, 16, 0], np.int32),
        slot_mapping=[np.array([30, 31, 32, 48], np.int32), np.array([110, 111, 80, 64], np.int32)],
        block_tables=tables,
        context_lens=np.array([17, 1], np.int32),
        cu_seqlens_q=np.array([0, 3, 4], np.int32),
        logits_rows=np.array([2, 3], np.int32),
        copies=[BlockCopy(1, 2, 3)],
        only_argmax=False,
    )


def received(step: messages.WireBatch, hidden: np.ndarray | None) -> Message:
    header = {
        "groups": len(step.slot_mapping), "hidden": hidden is not None, "only_argmax": step.only_argmax,
        "embeds": step.embeds,
    }  # fmt: skip
    return Message(Kind.STEP, header, messages.step_arrays(step, hidden))


def test_a_step_travels() -> None:
    step, rows = messages.read_step(received(batch(), HIDDEN), SPEC, 64)
    assert rows is HIDDEN and step.copies == [BlockCopy(1, 2, 3)] and not step.only_argmax
    greedy = replace(batch(), only_argmax=True)
    assert messages.read_step(received(greedy, HIDDEN), SPEC, 64)[0].only_argmax
    assert not step.embeds
    assert messages.read_step(received(replace(batch(), embeds=True), HIDDEN), SPEC, 64)[0].embeds
    for a, b in zip(messages.step_arrays(step, None), messages.step_arrays(batch(), None), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)
    size = payload_bytes(messages.step_arrays(batch(), HIDDEN))
    assert size <= messages.largest_step(SPEC, 64)


HOSTED = replace(SPEC, host_slots=(3, 9))
MOVES = {"spills": [BlockMove(0, 4, 2), BlockMove(1, 6, 8)], "loads": [BlockMove(1, 0, 0)]}


NOTHING = np.zeros((0, 64), np.float32)


def empty(**moves: list[BlockMove]) -> messages.WireBatch:
    """A step of moves alone; its hidden rows are NOTHING."""
    none, table = np.zeros(0, np.int32), np.zeros((0, 1), np.int32)
    zero = np.zeros(1, np.int32)
    return messages.WireBatch(none, none, [none] * 2, [table] * 2, none, zero, none, [], False, **moves)


def test_moves_travel_with_tokens_and_alone() -> None:
    for step, hidden in ((replace(batch(), **MOVES), HIDDEN), (empty(**MOVES), NOTHING)):
        got, _ = messages.read_step(received(step, hidden), HOSTED, 64)
        assert got.spills == MOVES["spills"] and got.loads == MOVES["loads"]
        assert len(got.positions) == len(hidden)
    full = {"spills": [BlockMove(1, 1, 1)] * sum(SPEC.num_blocks), "loads": [BlockMove(0, 1, 1)] * 12}
    size = payload_bytes(messages.step_arrays(replace(batch(), **full), HIDDEN))
    assert size <= messages.largest_step(HOSTED, 64)


@pytest.mark.parametrize("direction", ["spills", "loads"])
@pytest.mark.parametrize(
    "moves",
    [
        [BlockMove(0, 5, 0)],
        [BlockMove(0, -1, 0)],
        [BlockMove(0, 0, 3)],
        [BlockMove(1, 0, -1)],
        [BlockMove(2, 0, 0)],
        [BlockMove(-1, 0, 0)],
        [BlockMove(0, 0, 0)] * (1 + sum(SPEC.num_blocks)),
    ],
)
def test_a_move_outside_of_the_pools_or_of_host_memory(direction: str, moves: list[BlockMove]) -> None:
    for step, hidden in ((batch(), HIDDEN), (empty(), NOTHING)):
        setattr(step, direction, moves)
        with pytest.raises(WireError, match="a move outside"):
            messages.read_step(received(step, hidden), HOSTED, 64)


def test_a_move_where_there_is_no_host_memory() -> None:
    with pytest.raises(WireError, match="a move outside"):
        messages.read_step(received(empty(spills=[BlockMove(0, 0, 0)]), NOTHING), SPEC, 64)


@pytest.mark.parametrize("slots", [[3], [3, -1], [3, 1 << 31]])
def test_host_slots_that_are_none(slots: list[int]) -> None:
    header = messages.open_header("m", DeviceSpec("CPU"), HOSTED, 64)
    assert messages.read_stage(header) == HOSTED
    header["stage"]["host_slots"] = slots
    with pytest.raises(WireError):
        messages.read_stage(header)


@pytest.mark.parametrize(
    ("seconds", "nbytes"),
    [
        (None, 1),
        ("1", 1),
        (-1, 1),
        (float("inf"), 1),
        (10**400, 1),
        (1, -1),
        (1, 0.5),
        (1, None),
        (1, 10**400),
    ],
)
def test_what_moves_took_is_checked(seconds: object, nbytes: object) -> None:
    with pytest.raises(WireError):
        messages.moves_of(Message(Kind.RESULT, {"move_seconds": seconds, "moved_bytes": nbytes}, []))
    good = Message(Kind.RESULT, {"move_seconds": 1, "moved_bytes": 5}, [])
    assert messages.moves_of(good) == (1.0, 5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("positions", [14, 15, 32, 0]),
        ("positions", [14, 15, -1, 0]),
        ("positions", [14, 15, 16]),
        ("context_lens", [33, 1]),
        ("context_lens", [17, 0]),
        ("cu_seqlens_q", [0, 3, 5]),
        ("cu_seqlens_q", [0, 4, 4]),
        ("cu_seqlens_q", [1, 3, 4]),
        ("logits_rows", [2, 4]),
        ("logits_rows", [0, 1, 2, 3, 3]),
        ("input_ids", [5]),
    ],
)
def test_a_step_that_cannot_be_right(field: str, value: list[int]) -> None:
    step = batch()
    setattr(step, field, np.array(value, np.int32))
    with pytest.raises(WireError):
        messages.read_step(received(step, HIDDEN), SPEC, 64)


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize(
    ("field", "value"), [("slot_mapping", 112), ("slot_mapping", -1), ("block_tables", 7)]
)
def test_a_step_outside_of_the_pools(group: int, field: str, value: int) -> None:
    step = batch()
    getattr(step, field)[group].flat[1] = value
    with pytest.raises(WireError):
        messages.read_step(received(step, HIDDEN), SPEC, 64)


STATES = replace(SPEC, num_states=4)


def with_states(sources: list[int], writes: list[list[int]]) -> messages.WireBatch:
    return replace(
        batch(),
        state_sources=np.array(sources, np.int32),
        state_writes=np.array(writes, np.int32).reshape(-1, 3),
    )


def test_states_travel() -> None:
    for step in (with_states([2, 0], [[0, 2, 1], [0, 3, 2], [1, 1, 3]]), with_states([2, 0], []), batch()):
        got, _ = messages.read_step(received(step, HIDDEN), STATES, 64)
        np.testing.assert_array_equal(got.state_sources, step.state_sources)
        np.testing.assert_array_equal(got.state_writes, step.state_writes)
        size = payload_bytes(messages.step_arrays(step, HIDDEN))
        assert size <= messages.largest_step(STATES, 64)


@pytest.mark.parametrize(
    ("sources", "writes"),
    [
        ([2], []),
        ([2, 4], []),
        ([2, -1], []),
        ([2, 0], [[0, 3, 4]]),
        ([2, 0], [[0, 3, 0]]),
        ([2, 0], [[0, 4, 1]]),
        ([2, 0], [[0, 0, 1]]),
        ([2, 0], [[2, 1, 1]]),
        ([2, 0], [[-1, 1, 1]]),
        ([2, 0], [[1, 1, 1], [0, 1, 2]]),
        ([2, 0], [[0, 2, 1], [0, 2, 2]]),
        ([], [[0, 1, 1]]),
    ],
)
def test_states_that_cannot_be_right(sources: list[int], writes: list[list[int]]) -> None:
    with pytest.raises(WireError, match="states"):
        messages.read_step(received(with_states(sources, writes), HIDDEN), STATES, 64)


def test_states_where_there_are_none() -> None:
    with pytest.raises(WireError, match="states"):
        messages.read_step(received(with_states([1, 0], []), HIDDEN), SPEC, 64)


@pytest.mark.parametrize(
    "copy", [BlockCopy(2, 0, 0), BlockCopy(0, 5, 0), BlockCopy(1, 0, 7), BlockCopy(-1, 0, 0)]
)
def test_a_copy_outside_of_the_pools(copy: BlockCopy) -> None:
    step = batch()
    step.copies = [copy]
    with pytest.raises(WireError):
        messages.read_step(received(step, HIDDEN), SPEC, 64)


def test_hidden_rows_of_the_wrong_shape() -> None:
    with pytest.raises(WireError):
        messages.read_step(received(batch(), None), SPEC, 64)
    with pytest.raises(WireError):
        messages.read_step(received(batch(), HIDDEN), replace(SPEC, first=0), 64)
    for hidden in (
        np.zeros((4, 63), np.float32),
        np.zeros((3, 64), np.float32),
        np.zeros((4, 64), np.float16),
    ):
        with pytest.raises(WireError):
            messages.read_step(received(batch(), hidden), SPEC, 64)


def test_results_of_the_wrong_shape() -> None:
    rows, best = np.zeros((2, 9), np.float32), np.zeros(2, np.int32)

    def read(values: list[np.ndarray], greedy: bool = False, **header: object) -> tuple:
        message = Message(Kind.RESULT, {"argmax": True, "graph_seconds": 0.5} | header, values)
        return messages.result_of(message, 2, 9, greedy)

    result, argmax, seconds = read([rows, best])
    assert result is rows and argmax is best and seconds == 0.5
    assert read([rows], argmax=False)[1] is None
    assert read([rows[:0], best], greedy=True)[1] is best and read([rows], greedy=True, argmax=False)
    for values, header in (
        ([rows], {}),
        ([rows[:1], best], {}),
        ([rows, best[:1]], {}),
        ([best, best], {}),
        ([rows, best], {"graph_seconds": "1"}),
        ([rows, best], {"graph_seconds": -1.0}),
        ([rows, best], {"graph_seconds": float("inf")}),
        ([rows, best], {"graph_seconds": 10**400}),
        ([rows[:0], best], {}),
        ([rows, best], {"greedy": True}),
        ([rows[:0]], {"greedy": True, "argmax": False}),
    ):
        with pytest.raises(WireError):
            read(values, **header)
