"""The channel between two processes of this machine: a pipe for heads, shared memory for arrays.

Each direction has a ring of slots in shared memory. The sender copies a message's arrays into the next
slot, the receiver sees them there. What does not fit a slot goes through the pipe, as does everything
where there is no shared memory. Only bytes go through the pipe, never pickles:

    frame    place (1 byte: slot, INLINE or NO_PAYLOAD), then the head; INLINE: then a frame, the payload
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np

from hetero.pipeline.channel import (
    MAX_HEAD_BYTES,
    ChannelClosed,
    Head,
    Kind,
    Message,
    WireError,
    decode_head,
    encode_head,
    payload_bytes,
    read_payload,
    write_payload,
)

INLINE, NO_PAYLOAD = 254, 255  # the other places are slots
MAX_SLOTS = 254
SLOT_ALIGNMENT = 4096


class Segment(SharedMemory):
    """Whose memory goes with the last array in it, without a complaint."""

    def __del__(self) -> None:
        with contextlib.suppress(BufferError, OSError):
            self.close()


class Ring:
    """`slots` equal pieces of shared memory. `name` None creates it (the owner), else it is attached to.

    Raises OSError when the memory cannot be had.
    """

    def __init__(self, slots: int, slot_bytes: int, name: str | None = None):
        assert 0 < slots <= MAX_SLOTS
        self.slots, self.slot_bytes = slots, -(-slot_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        size = self.slots * self.slot_bytes
        self._linked = name is None
        own = f"hetero_{os.getpid()}_{secrets.token_hex(4)}"  # no longer than macOS allows
        self._segment = Segment(name or own, create=name is None, size=size)
        try:
            if name is None:
                _commit(self._segment.name, size)
            elif self._segment.size < size:
                raise OSError(f"shared memory of {self._segment.size} bytes instead of {size}")
        except OSError:
            self.close()
            raise

    @property
    def name(self) -> str:
        return self._segment.name

    def slot(self, index: int) -> memoryview:
        """Raises WireError for a slot that does not exist."""
        if not 0 <= index < self.slots:
            raise WireError(f"slot {index} of {self.slots}")
        assert self._segment.buf is not None, "closed"
        return self._segment.buf[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def unlink(self) -> None:
        """Remove the name, once both ends have the memory: it then goes with them, however they end."""
        if self._linked:
            self._linked = False
            with contextlib.suppress(FileNotFoundError):
                self._segment.unlink()

    def close(self) -> None:
        """Idempotent. The memory stays as long as arrays in it are in use."""
        self.unlink()
        with contextlib.suppress(BufferError):
            self._segment.close()


def _commit(name: str, size: int) -> None:
    """Reserve the pages. Linux promises more than /dev/shm holds, and kills who then writes."""
    path = Path("/dev/shm") / name.lstrip("/")
    if hasattr(os, "posix_fallocate") and path.exists():
        fd = os.open(path, os.O_RDWR)
        try:
            os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)


class PipeChannel:
    """See hetero.pipeline.channel.Channel. `outgoing` and `incoming` are rings, or None for bytes alone.

    `limit` is the largest payload that is accepted; `abort` must make the other end's process go away.
    """

    def __init__(
        self,
        connection: Connection,
        outgoing: Ring | None,
        incoming: Ring | None,
        limit: int,
        abort: Callable[[], None],
    ):
        self._connection, self._outgoing, self._incoming = connection, outgoing, incoming
        self._limit, self._abort = limit, abort
        self._send_lock = threading.Lock()
        self._next_slot = 0

    def send(self, kind: Kind, header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        head, nbytes, ring = encode_head(kind, header, arrays), payload_bytes(arrays), self._outgoing
        with self._send_lock:
            place, data = (INLINE if nbytes else NO_PAYLOAD), b""
            if nbytes and ring is not None and nbytes <= ring.slot_bytes:
                place, self._next_slot = self._next_slot, (self._next_slot + 1) % ring.slots
                write_payload(arrays, ring.slot(place))
            elif nbytes:
                buffer = bytearray(nbytes)
                write_payload(arrays, buffer)
                data = bytes(buffer)
            try:
                self._connection.send_bytes(bytes((place,)) + head)
                if data:
                    self._connection.send_bytes(data)
            except (OSError, ValueError) as error:
                raise ChannelClosed(str(error)) from None

    def receive(self, timeout: float | None = None) -> Message | None:
        try:
            if timeout is not None and not self._connection.poll(timeout):
                return None
            frame = self._connection.recv_bytes(MAX_HEAD_BYTES + 1)
            if not frame:
                raise WireError("an empty frame")
            head = decode_head(memoryview(frame)[1:], self._limit)
            return Message(head.kind, head.header, self._arrays(frame[0], head))
        except (EOFError, OSError) as error:
            raise ChannelClosed(str(error)) from None

    def _arrays(self, place: int, head: Head) -> list[np.ndarray]:
        if place == NO_PAYLOAD or not head.payload_bytes:
            return read_payload(head, b"")
        if place != INLINE:
            if self._incoming is None:
                raise WireError("a slot without shared memory")
            return read_payload(head, self._incoming.slot(place))
        data = bytearray(self._connection.recv_bytes(head.payload_bytes))
        return read_payload(head, data)

    def abort(self) -> None:
        self._abort()

    def close(self) -> None:
        self._connection.close()
        for ring in (self._outgoing, self._incoming):
            if ring is not None:
                ring.close()
