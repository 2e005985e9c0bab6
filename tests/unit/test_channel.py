"""Messages to stages that live elsewhere: what goes in comes out, and garbage is refused before it costs."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import DeviceSpec
from backends.ggml.stage import StageSpec
from hetero.batch import BlockCopy
from hetero.pipeline import messages
from hetero.pipeline.channel import (
    MAX_ARRAYS,
    MAX_HEAD_BYTES,
    ChannelClosed,
    Kind,
    Message,
    WireError,
    decode_head,
    encode_head,
    payload_bytes,
    read_payload,
    write_payload,
)
from hetero.pipeline.pipe import INLINE, PipeChannel, Ring

DTYPES = [np.int32, np.int64, np.float16, np.float32, np.uint8]
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=20)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip
headers = st.dictionaries(st.text(max_size=8), plain, max_size=5)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    raw = np.frombuffer(draw(st.binary(min_size=5000, max_size=5000)), np.uint8)
    values = raw[: int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)
    return values.T if draw(st.booleans()) else values


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@given(st.sampled_from(Kind), headers, st.lists(arrays(), max_size=6))
@settings(deadline=None, max_examples=150)
def test_a_message_comes_back_as_it_was(kind: Kind, header: dict, values: list[np.ndarray]) -> None:
    data, size = encode_head(kind, header, values), payload_bytes(values)
    payload = bytearray(size)
    write_payload(values, payload)
    head = decode_head(data, size)
    assert (head.kind, head.header, head.payload_bytes) == (kind, header, size)
    back = read_payload(head, payload)
    assert all(same(a, b) for a, b in zip(values, back, strict=True))
    if size:
        with pytest.raises(WireError):
            decode_head(data, size - 1)
        with pytest.raises(WireError):
            read_payload(head, payload[:-1])


@given(st.binary(max_size=200) | plain.map(lambda v: json.dumps(v).encode()))
@settings(deadline=None, max_examples=300)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_head(data, 1 << 20)


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_a_head_with_one_wrong_byte_is_refused_or_within_the_limit(data: st.DataObject) -> None:
    head = bytearray(
        encode_head(Kind.STEP, {"step": 1}, [np.zeros((3, 2), np.float32), np.zeros(4, np.uint8)])
    )
    head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert decode_head(head, 64).payload_bytes <= 64
    except WireError:
        return


def head_with(**parts: object) -> bytes:
    return json.dumps({"kind": 1, "header": {}, "arrays": []} | parts).encode()


@pytest.mark.parametrize(
    "data",
    [
        head_with(kind=99),
        head_with(kind=True),
        head_with(header=[]),
        head_with(more=1),
        head_with(arrays=[["f8", [1]]]),
        head_with(arrays=[["O", [1]]]),
        head_with(arrays=[["f4", [-1]]]),
        head_with(arrays=[["f4", [True]]]),
        head_with(arrays=[["f4", [2.0]]]),
        head_with(arrays=[["f4", [0, 1 << 39, 1 << 39]]]),
        head_with(arrays=[["f4", [1 << 39, 1 << 39, 1 << 39]]]),
        head_with(arrays=[["f4", [1, 1, 1, 1, 1]]]),
        head_with(arrays=[["f4", 3]]),
        head_with(arrays=[["u1", [0]]] * (MAX_ARRAYS + 1)),
        head_with(header={"x": float("nan")}),
        b"[" * 100_000,
        b'{"kind":' + b"9" * 10_000 + b"}",
        b" " * (MAX_HEAD_BYTES + 1),
    ],
)
def test_bad_heads(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_head(data, 1 << 40)


@pytest.mark.parametrize(
    ("header", "values"),
    [
        ({"x": float("inf")}, []),
        ({"x": object()}, []),
        ({"x": "y" * MAX_HEAD_BYTES}, []),
        ({}, [np.zeros(1, np.float64)]),
        ({}, [np.zeros(1, np.complex64)]),
        ({}, [np.zeros((1,) * 5, np.int32)]),
    ],
)
def test_what_no_message_can_hold(header: dict, values: list[np.ndarray]) -> None:
    with pytest.raises(WireError):
        encode_head(Kind.STEP, header, values)


# -- pipe and shared memory ------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["shared", "bytes"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[PipeChannel, PipeChannel]]:
    """A channel from here to here; 2 slots of one page where there is shared memory."""
    near, far = multiprocessing.Pipe()
    ring = Ring(2, 4096) if request.param else None
    other = Ring(2, 4096, ring.name) if ring is not None else None
    sender, receiver = (
        PipeChannel(near, ring, None, 0, near.close),
        PipeChannel(far, None, other, 1 << 20, far.close),
    )
    yield sender, receiver
    sender.close()
    receiver.close()


def test_arrays_of_any_size_arrive(ends: tuple[PipeChannel, PipeChannel]) -> None:
    sender, receiver = ends
    assert receiver.receive(0) is None
    for size in (0, 1, 1000, 1024, 1025, 100_000):  # a slot holds 1024 floats
        values = np.arange(size, dtype=np.float32)
        thread = threading.Thread(target=sender.send, args=(Kind.RESULT, {"n": size}, [values]))
        thread.start()
        message = receiver.receive(10.0)
        thread.join()
        assert message is not None and message.header == {"n": size}
        assert same(message.arrays[0], values)
        message.arrays[0][:] = 7  # results are the sampler's to change


def test_a_received_array_outlives_one_more_message_and_the_channel(
    ends: tuple[PipeChannel, PipeChannel],
) -> None:
    sender, receiver = ends
    kept = []
    for i in range(3):
        sender.send(Kind.RESULT, {}, [np.full(8, i, np.int32)])
        message = receiver.receive()
        assert message is not None
        kept.append(message.arrays[0])
        assert all((kept[j] == j).all() for j in (i - 1, i) if j >= 0)
    sender.close()
    receiver.close()
    assert (kept[2] == 2).all()


def test_the_other_end_goes_away(ends: tuple[PipeChannel, PipeChannel]) -> None:
    sender, receiver = ends
    sender.send(Kind.PING, {})
    sender.close()
    assert receiver.receive(5.0).kind == Kind.PING  # type: ignore[union-attr]
    with pytest.raises(ChannelClosed):
        receiver.receive(5.0)
    with pytest.raises(ChannelClosed):
        receiver.send(Kind.PONG, {})


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff",
        b"\xff{}",
        b"\x05" + encode_head(Kind.STEP, {}, [np.zeros(4, np.float32)]),  # there is no slot 5
        b"\xff" + encode_head(Kind.STEP, {}, [np.zeros(4, np.float32)]),  # and no payload
        bytes((INLINE,)) + encode_head(Kind.STEP, {}, [np.zeros(1 << 20, np.float32)]),  # over the limit
    ],
)
def test_a_broken_frame(frame: bytes, ends: tuple[PipeChannel, PipeChannel]) -> None:
    sender, receiver = ends
    sender._connection.send_bytes(frame)
    with pytest.raises(WireError):
        receiver.receive(5.0)


def test_a_payload_shorter_than_its_head_says(ends: tuple[PipeChannel, PipeChannel]) -> None:
    sender, receiver = ends
    sender._connection.send_bytes(bytes((INLINE,)) + encode_head(Kind.STEP, {}, [np.zeros(4, np.float32)]))
    sender._connection.send_bytes(b"short")
    with pytest.raises(WireError):
        receiver.receive(5.0)


# -- stages and steps ------------------------------------------------------------------------------

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
    }  # fmt: skip
    return Message(Kind.STEP, header, messages.step_arrays(step, hidden))


def test_a_step_travels() -> None:
    step, rows = messages.read_step(received(batch(), HIDDEN), SPEC, 64)
    assert rows is HIDDEN and step.copies == [BlockCopy(1, 2, 3)] and not step.only_argmax
    greedy = replace(batch(), only_argmax=True)
    assert messages.read_step(received(greedy, HIDDEN), SPEC, 64)[0].only_argmax
    for a, b in zip(messages.step_arrays(step, None), messages.step_arrays(batch(), None), strict=True):
        assert same(a, b)
    size = payload_bytes(messages.step_arrays(batch(), HIDDEN))
    assert size <= messages.largest_step(SPEC, 64)


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
        ([rows[:0], best], {}),
        ([rows, best], {"greedy": True}),
        ([rows[:0]], {"greedy": True, "argmax": False}),
    ):
        with pytest.raises(WireError):
            read(values, **header)
