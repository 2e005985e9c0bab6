"""How two machines prove to each other that they hold the same secret, before anything else is read.

    client  magic, version, nonce Nc        37 bytes
    server  magic, version, nonce Ns        37 bytes
    client  HMAC(K, "client" Nc Ns)         32 bytes
    server  HMAC(K, "server" Nc Ns)         32 bytes

HMAC is HMAC-SHA256 (RFC 2104), K the SHA-256 of the secret, the nonces 32 random bytes. The role is part
of what is authenticated, so that an answer cannot be sent back to who gave it, and the client goes first:
who does not know the secret learns nothing but a random number. All sizes are fixed, nothing is parsed.

Both then derive a key for each direction, with which wire.py authenticates every frame. Nothing is
encrypted: see docs/worker.md.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from dataclasses import dataclass

MAGIC = b"HTRO"
VERSION = 1
NONCE_BYTES = MAC_BYTES = 32
MIN_SECRET = 16  # characters: who overhears a handshake can try secrets at leisure
SECONDS = 5.0  # for the whole handshake
_GREETING = MAGIC + bytes([VERSION])


class HandshakeError(ConnectionError):
    """The other end is no hetero, or has another secret, or fell silent. One line."""


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """Keys of 32 bytes for the frames of one connection, as its end sees them."""

    send: bytes
    receive: bytes


def as_client(sock: socket.socket, secret: bytes, seconds: float = SECONDS) -> SessionKeys:
    """Prove the secret to a worker and have it prove it too. Raises HandshakeError."""
    line, own = _Line(sock, seconds), secrets.token_bytes(NONCE_BYTES)
    line.send(_GREETING + own)
    theirs = line.greeting()
    line.send(_proof(secret, b"client", own, theirs))
    try:
        proof = line.receive(MAC_BYTES)
    except HandshakeError:
        raise HandshakeError("it ended the handshake: does it have the same secret?") from None
    if not hmac.compare_digest(proof, _proof(secret, b"server", own, theirs)):
        raise HandshakeError("it does not know the secret")
    return SessionKeys(_proof(secret, b"to server", own, theirs), _proof(secret, b"to client", own, theirs))


def as_server(sock: socket.socket, secret: bytes, seconds: float = SECONDS) -> SessionKeys:
    """The worker's side. Raises HandshakeError; the connection is then to be closed without a word."""
    line, own = _Line(sock, seconds), secrets.token_bytes(NONCE_BYTES)
    theirs = line.greeting()
    line.send(_GREETING + own)
    if not hmac.compare_digest(line.receive(MAC_BYTES), _proof(secret, b"client", theirs, own)):
        raise HandshakeError("wrong secret")
    line.send(_proof(secret, b"server", theirs, own))
    return SessionKeys(_proof(secret, b"to client", theirs, own), _proof(secret, b"to server", theirs, own))


class _Line:
    """Fixed-size messages over a socket, all within one deadline."""

    def __init__(self, sock: socket.socket, seconds: float):
        self._sock, self._end = sock, time.monotonic() + seconds

    def greeting(self) -> bytes:
        """The nonce of the other end."""
        received = self.receive(len(_GREETING) + NONCE_BYTES, _GREETING)
        return received[len(_GREETING) :]

    def receive(self, count: int, start: bytes = b"") -> bytes:
        """`count` bytes that begin with `start`; the first wrong byte ends it."""
        data = b""
        while len(data) < count:
            self._wait()
            try:
                part = self._sock.recv(count - len(data))
            except OSError as error:
                raise HandshakeError(_reason(error)) from None
            if not part:
                raise HandshakeError("the connection ended within the handshake")
            data += part
            if data[: len(start)] != start[: len(data)]:
                same = data[: len(MAGIC)] == MAGIC
                raise HandshakeError("another version of hetero" if same else "this is no hetero handshake")
        return data

    def send(self, data: bytes) -> None:
        self._wait()
        try:
            self._sock.sendall(data)
        except OSError as error:
            raise HandshakeError(_reason(error)) from None

    def _wait(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise HandshakeError("the handshake took too long")
        self._sock.settimeout(left)


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "the handshake took too long"
    return f"the connection ended within the handshake ({error.strerror or error})"


def _proof(secret: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    key = hashlib.sha256(b"hetero worker\0" + secret).digest()
    return hmac.digest(key, role + b"\0" + client_nonce + server_nonce, "sha256")
