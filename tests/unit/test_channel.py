"""Messages to stages that live elsewhere: what goes in comes out, and garbage is refused before it costs."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.pipeline.channel import (
    MAX_ARRAYS,
    MAX_HEAD_BYTES,
    ChannelClosed,
    Kind,
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
