"""Frames and handshakes between machines: what is sent arrives, and nothing else is believed."""

from __future__ import annotations

import contextlib
import hmac
import pickle
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from frames import BAD_FRAMES, frame, head, ping
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.pipeline import handshake, wire
from hetero.pipeline.channel import ChannelClosed, Kind, WireError
from hetero.pipeline.handshake import HandshakeError, SessionKeys
from hetero.pipeline.wire import CHUNK, SocketChannel

LIMIT = 1 << 16
UP, DOWN = b"u" * 32, b"d" * 32
SECRET = b"correct horse battery staple"


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


@contextlib.contextmanager
def channels(keep: int = 2, limit: int = LIMIT) -> Iterator[tuple[SocketChannel, SocketChannel]]:
    near, far = tcp_pair()
    ends = (
        SocketChannel(near, SessionKeys(UP, DOWN), limit, keep),
        SocketChannel(far, SessionKeys(DOWN, UP), limit, keep),
    )
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


@contextlib.contextmanager
def raw_and_channel(limit: int = LIMIT) -> Iterator[tuple[socket.socket, SocketChannel]]:
    """A bare socket, and the channel that reads what is written to it."""
    near, far = tcp_pair()
    channel = SocketChannel(far, SessionKeys(DOWN, UP), limit)
    try:
        yield near, channel
    finally:
        near.close()
        channel.close()


arrays = st.lists(
    st.tuples(
        st.sampled_from(["i4", "i8", "f4", "u1", "f2"]), st.lists(st.integers(0, 5), min_size=0, max_size=4)
    ),
    max_size=5,
).map(lambda parts: [np.arange(np.prod(shape, dtype=int)).astype(t).reshape(shape) for t, shape in parts])
headers = st.dictionaries(
    st.text(max_size=5), st.none() | st.integers() | st.text(max_size=9) | st.lists(st.booleans())
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(Kind)), headers, arrays), max_size=8), st.integers(1, 3))
def test_messages_arrive_as_they_were_sent(messages, keep):
    with channels(keep) as (near, far):
        for kind, header, values in messages:
            near.send(kind, header, values)
        received = []
        for kind, header, values in messages:
            message = far.receive(5)
            far.check_invariants()
            assert message is not None and (message.kind, message.header) == (kind, header)
            received.append((message, values))
            for late, sent in received[-keep:]:  # older arrays have not been written over
                assert len(late.arrays) == len(sent)
                for a, b in zip(late.arrays, sent, strict=True):
                    assert a.dtype == b.dtype
                    np.testing.assert_array_equal(a, b)
        assert near.bytes_sent == far.bytes_received
        assert far.receive(0) is None


def test_a_large_payload_arrives_in_parts():
    values = np.random.default_rng(0).integers(0, 255, 5 * CHUNK + 3).astype(np.uint8)
    with channels(limit=1 << 24) as (near, far):
        sender = threading.Thread(target=near.send, args=(Kind.STEP, {}, [values]))
        sender.start()
        message = far.receive(5)
        sender.join()
        assert message is not None
        np.testing.assert_array_equal(message.arrays[0], values)


GOOD = ping(UP)


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_bad_frame_ends_the_connection(name):
    with raw_and_channel() as (raw, channel):
        raw.sendall(BAD_FRAMES[name](UP))
        with pytest.raises(WireError):
            while channel.receive(5) is not None:
                pass
        channel.check_invariants()
        with pytest.raises(ChannelClosed):  # and for good
            channel.receive(5)
        raw.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert raw.recv(1) == b""


def test_a_frame_that_is_sent_again():
    with raw_and_channel() as (raw, channel):
        raw.sendall(GOOD + GOOD)
        assert channel.receive(5) is not None
        with pytest.raises(WireError, match="not authentic"):
            channel.receive(5)


@pytest.mark.parametrize("cut", [1, 15, 16, 30, len(GOOD) - 1])
def test_a_truncated_frame(cut):
    with raw_and_channel() as (raw, channel):
        raw.sendall(GOOD[:cut])
        raw.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelClosed):
            channel.receive(5)


@pytest.mark.parametrize("cut", [1, 20, len(GOOD) - 1])
def test_a_frame_that_stops_in_the_middle(cut, monkeypatch):
    """As of a process that was stopped: the connection stays open, and a PING would go unanswered."""
    monkeypatch.setattr(wire, "FRAME_SECONDS", 0.2)
    with raw_and_channel() as (raw, channel):
        raw.sendall(GOOD[:cut])
        with pytest.raises(ChannelClosed, match="middle of a frame"):
            channel.receive(5)


def test_the_right_frame_is_taken():
    """What the bad ones are variations of."""
    with raw_and_channel() as (raw, channel):
        raw.sendall(GOOD + frame(head(arrays=[["f4", [4, 4]]]), bytes(64), key=UP, count=1))
        first, second = channel.receive(5), channel.receive(5)
        assert first is not None and first.kind == Kind.PING
        assert second is not None and second.arrays[0].shape == (4, 4)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_bytes_do_anything_but_end_the_connection(data):
    """Whatever the bytes: messages whose MAC is right come of it, or an error that ends the connection."""
    good = frame(head(arrays=[["i4", [3]]]), bytes(12), key=UP)
    if data.draw(st.booleans()):
        position = data.draw(st.integers(0, len(good) - 1))
        change = data.draw(st.integers(1, 255))
        sent = good[:position] + bytes([good[position] ^ change]) + good[position + 1 :]
    else:
        sent = data.draw(st.binary(max_size=200)) + data.draw(st.sampled_from([b"", good]))
    with raw_and_channel() as (raw, channel):
        raw.sendall(sent)
        raw.shutdown(socket.SHUT_WR)
        with pytest.raises((WireError, ChannelClosed)):
            while (message := channel.receive(5)) is not None:
                assert sent == good and message.kind == Kind.STEP
        channel.check_invariants()


def test_abort_wakes_a_thread_that_waits():
    with channels() as (near, _):
        errors: list[Exception] = []

        def wait() -> None:
            try:
                near.receive()
            except ChannelClosed as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        near.abort()
        thread.join(5)
        assert not thread.is_alive() and len(errors) == 1


def test_what_cannot_be_sent_is_refused_before_anything_goes_out():
    with channels() as (near, far):
        with pytest.raises(WireError):
            near.send(Kind.STEP, {}, [np.zeros(3, np.float64)])
        near.send(Kind.PING, {})
        message = far.receive(5)
        assert message is not None and message.kind == Kind.PING


def shake(client_secret: bytes, server_secret: bytes) -> tuple[object, object]:
    """What both ends get: their keys, or the error."""
    near, far = tcp_pair()
    result: list[object] = [None]

    def serve() -> None:
        with far:
            try:
                result[0] = handshake.as_server(far, server_secret)
            except HandshakeError as error:
                result[0] = error

    thread = threading.Thread(target=serve)
    thread.start()
    with near:
        try:
            keys: object = handshake.as_client(near, client_secret)
        except HandshakeError as error:
            keys = error
        thread.join(10)
    return keys, result[0]


def test_a_handshake_gives_both_ends_the_same_keys():
    (client, server), (other, _) = shake(SECRET, SECRET), shake(SECRET, SECRET)
    assert isinstance(client, SessionKeys) and isinstance(server, SessionKeys)
    assert (client.send, client.receive) == (server.receive, server.send)
    assert client.send != client.receive
    assert isinstance(other, SessionKeys) and other.send != client.send


def test_a_wrong_secret():
    client, server = shake(b"wrong" + SECRET, SECRET)
    assert isinstance(server, HandshakeError) and "wrong secret" in str(server)
    assert isinstance(client, HandshakeError) and "same secret" in str(client)


def test_a_server_that_does_not_know_the_secret_is_noticed():
    near, far = tcp_pair()

    def impostor() -> None:
        with far:
            nonce = far.recv(37)[5:]
            far.sendall(b"HTRO\x01" + nonce)  # the client's own nonce and proof, sent back to it
            far.sendall(far.recv(32))

    thread = threading.Thread(target=impostor)
    thread.start()
    with near, pytest.raises(HandshakeError, match="does not know"):
        handshake.as_client(near, SECRET)
    thread.join()


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n", b"HTRO\x09" + bytes(32), GOOD, pickle.dumps([1, 2, 3]), bytes(37), b""],
    ids=["http", "version", "frame", "pickle", "zeros", "nothing"],
)
def test_what_is_no_handshake_gets_no_answer(sent):
    near, far = tcp_pair()
    with near, far:
        near.sendall(sent)
        near.shutdown(socket.SHUT_WR)
        with pytest.raises(HandshakeError):
            handshake.as_server(far, SECRET)
        far.close()
        with contextlib.suppress(ConnectionResetError):
            assert near.recv(100) == b""


def test_who_sends_a_greeting_learns_nothing_about_the_secret():
    near, far = tcp_pair()

    def serve() -> None:
        with contextlib.suppress(HandshakeError):
            handshake.as_server(far, SECRET)

    thread = threading.Thread(target=serve)
    thread.start()
    with near, far:
        near.sendall(b"HTRO\x01" + bytes(32))
        answer = near.recv(100)
        near.sendall(hmac.digest(b"guess", answer, "sha256"))
        thread.join(10)
        far.close()
        assert answer[:5] == b"HTRO\x01" and len(answer) == 37
        assert near.recv(100) == b""


def test_a_slow_handshake_is_ended():
    near, far = tcp_pair()
    with near, far:
        near.sendall(b"HTRO")
        with pytest.raises(HandshakeError, match="too long"):
            handshake.as_server(far, SECRET, seconds=0.2)
