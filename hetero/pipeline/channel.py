"""Messages to a stage that lives elsewhere, in a child process or on another machine.

A message is a kind, a header of plain JSON, and arrays. On the wire it is a *head* and a *payload*:

    head     UTF-8 JSON {"kind": 5, "header": {...}, "arrays": [["f4", [16, 576]], ...]}, at most 1 MiB
    payload  the arrays' bytes, C order, little endian, each at the next multiple of ALIGNMENT

The head alone says how long the payload is, so that a reader checks it against its limit before it makes
room. How the two are framed is the channel's business. Nothing here ever unpickles or holds an address.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

ALIGNMENT = 16
MAX_HEAD_BYTES = 1 << 20
MAX_ARRAYS = 64
MAX_DIMS = 4
_DTYPES = {name: np.dtype("<" + name) for name in ("i4", "i8", "f2", "f4", "u1")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
assert sys.byteorder == "little", "payloads are sent as they lie in memory"


class Kind(IntEnum):
    """What a message says; the near end is the one that holds the step's inputs.

    near to far: OPEN, STEP, CHECK, PING, CLOSE; far to near: PROGRESS, OPENED, RESULT, CHECKED, FAILED,
    PONG, LOG. The headers are made and read in hetero.pipeline.messages and hetero.pipeline.child. With a
    worker on another machine, HELLO, WEIGHTS, WANTED and CHUNK come first: see hetero.pipeline.remote.
    """

    OPEN = 1
    PROGRESS = 2
    OPENED = 3
    FAILED = 4
    STEP = 5
    RESULT = 6
    PING = 7
    PONG = 8
    CLOSE = 9
    LOG = 10
    HELLO = 11
    WEIGHTS = 12
    WANTED = 13
    CHUNK = 14
    CHECK = 15
    CHECKED = 16


_KINDS = {int(kind): kind for kind in Kind}


class ChannelClosed(ConnectionError):
    """The other end is gone; nothing more comes or goes."""


class WireError(ValueError):
    """What came is no message of this protocol; the connection is of no use any more."""


@dataclass(slots=True)
class Message:
    """Received arrays may be views of the channel's buffers: see Channel.receive."""

    kind: Kind
    header: dict[str, Any]
    arrays: list[np.ndarray] = field(default_factory=list)


class Channel(Protocol):
    """Two ends that exchange messages in order."""

    def send(self, kind: Kind, header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Any thread may send; the arrays can be changed afterwards. Blocks while the other end does not
        read. Raises ChannelClosed, and WireError for what no message can hold."""
        ...

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message, or None if none has begun to come within `timeout` seconds (None: no limit).

        One thread at a time. Arrays stay valid while as many further messages with arrays are received as
        steps can be in flight. Raises ChannelClosed when the other end is gone, WireError for garbage.
        """
        ...

    def abort(self) -> None:
        """End the connection at once, from any thread: calls that wait in it raise ChannelClosed soon."""
        ...

    def close(self) -> None:
        """Free everything. No other thread may be using the channel. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Head:
    """A decoded head. `layout` has (dtype, shape, offset in the payload) per array."""

    kind: Kind
    header: dict[str, Any]
    layout: tuple[tuple[np.dtype, tuple[int, ...], int], ...]
    payload_bytes: int


def encode_head(kind: Kind, header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> bytes:
    """The head of a message. Raises WireError for what a receiver would refuse."""
    if len(arrays) > MAX_ARRAYS or any(a.ndim > MAX_DIMS or a.dtype not in _NAMES for a in arrays):
        raise WireError(f"cannot be sent: {[(a.dtype.name, a.ndim) for a in arrays][:MAX_ARRAYS]}")
    parts = {
        "kind": int(kind), "header": header, "arrays": [[_NAMES[a.dtype], list(a.shape)] for a in arrays],
    }  # fmt: skip
    try:
        data = json.dumps(parts, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"the header is no plain JSON: {error}") from None
    if len(data) > MAX_HEAD_BYTES:
        raise WireError(f"a head of {len(data)} bytes, more than {MAX_HEAD_BYTES}")
    return data


def decode_head(data: bytes | bytearray | memoryview, max_payload: int) -> Head:
    """The head of a message whose payload has at most `max_payload` bytes. Raises WireError."""
    if len(data) > MAX_HEAD_BYTES:
        raise WireError(f"a head of {len(data)} bytes, more than {MAX_HEAD_BYTES}")
    try:
        parts = json.loads(bytes(data).decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise WireError("the head is no JSON") from None
    if not isinstance(parts, dict) or parts.keys() != {"kind", "header", "arrays"}:
        raise WireError("the head has other fields than kind, header and arrays")
    kind, header, arrays = parts["kind"], parts["header"], parts["arrays"]
    if type(kind) is not int or kind not in _KINDS:
        raise WireError("unknown kind of message")
    if not isinstance(header, dict) or not isinstance(arrays, list) or len(arrays) > MAX_ARRAYS:
        raise WireError("header must be an object, arrays a short list")
    layout, end = [], 0
    for descriptor in arrays:
        dtype, shape = _descriptor(descriptor)
        offset = _aligned(end)
        end = offset + dtype.itemsize * math.prod(shape)
        if end > max_payload:
            raise WireError(f"a payload of more than {max_payload} bytes")
        layout.append((dtype, shape, offset))
    return Head(_KINDS[kind], header, tuple(layout), end)


def payload_bytes(arrays: Iterable[np.ndarray]) -> int:
    """Length of the payload that holds these arrays."""
    end = 0
    for array in arrays:
        end = _aligned(end) + array.nbytes
    return end


def write_payload(arrays: Iterable[np.ndarray], out: memoryview | bytearray) -> None:
    """Lay the arrays out in `out`, which has at least payload_bytes(arrays) bytes."""
    end = 0
    for array in arrays:
        offset = _aligned(end)
        end = offset + array.nbytes
        np.ndarray(array.shape, array.dtype, out, offset)[...] = array


def read_payload(head: Head, data: bytes | bytearray | memoryview) -> list[np.ndarray]:
    """Views of a payload's arrays. Raises WireError when `data` is shorter than the head says."""
    if len(data) < head.payload_bytes:
        raise WireError(f"a payload of {len(data)} bytes instead of {head.payload_bytes}")
    return [_view(data, *place) for place in head.layout]


def _descriptor(descriptor: Any) -> tuple[np.dtype, tuple[int, ...]]:
    match descriptor:
        case [str(name), [*shape]] if name in _DTYPES and len(shape) <= MAX_DIMS:
            if all(type(n) is int and n >= 0 for n in shape) and math.prod(n or 1 for n in shape) < 1 << 40:
                return _DTYPES[name], tuple(shape)
    raise WireError("an array is not [type, [sizes]]")


def _view(
    data: bytes | bytearray | memoryview, dtype: np.dtype, shape: tuple[int, ...], offset: int
) -> np.ndarray:
    """Unlike np.ndarray's constructor, frombuffer keeps `data` from being freed under the array."""
    count = math.prod(shape)
    if not count:
        return np.empty(shape, dtype)
    return np.frombuffer(data, dtype, count, offset).reshape(shape)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
