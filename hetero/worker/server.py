"""Listens for servers. Each that proves the secret gets a process of its own, with devices to itself.

This process parses nothing but the fixed-size handshake. The connection then goes to the child process,
so that neither a frame nor a driver that aborts can reach another connection's stage. What a child tells
over its pipe is one JSON object per message: a sign of life each second, or the wish for a device.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from hetero.pipeline import handshake
from hetero.pipeline.handshake import HandshakeError
from hetero.worker.secret import Secret

MAX_HANDSHAKES = 16  # connections that have proved nothing yet; more are closed at once
MAX_SESSIONS = 32
SILENCE_SECONDS = 10.0  # a child that gives no sign of life for so long is ended
START_SECONDS = 60.0  # the same before its first one
RELEASE_SECONDS = 3.0  # a device that is held is waited for: its holder may be about to end
_log = logging.getLogger("hetero.worker")


@dataclass(slots=True, eq=False)
class Session:
    """A connection whose other end has proved the secret, and the process that serves it."""

    peer: str
    process: SpawnProcess
    control: Connection
    device: str | None = None  # that it holds


class Worker:
    """Owns the listening sockets and the child processes. `target` runs in a child: see session.run."""

    def __init__(
        self,
        sockets: list[socket.socket],
        secret: Secret,
        target: Callable[..., None],
        options: dict[str, Any],
        exclusive: Callable[[str], bool],
    ):
        """`options` goes to each child; `exclusive` says whether a device serves one connection at a time."""
        self._sockets, self._secret, self._target, self._options = sockets, secret, target, options
        self._exclusive = exclusive
        self._handshakes = threading.Semaphore(MAX_HANDSHAKES)
        self._lock = threading.Condition()  # notified when a session has ended
        self._sessions: set[Session] = set()
        self._closing = False

    def start(self) -> None:
        """Begin to accept, in threads."""
        for sock in self._sockets:
            sock.listen(64)
            threading.Thread(target=self._accept, args=(sock,), daemon=True, name="accept").start()

    def close(self) -> None:
        """Stop listening and end all children."""
        with self._lock:
            self._closing = True
            sessions = list(self._sessions)
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes accept
            sock.close()
        for session in sessions:
            session.process.kill()
        for session in sessions:
            session.process.join()

    def sessions(self) -> list[tuple[str, str | None]]:
        """(peer, device that it holds) of each session."""
        with self._lock:
            return sorted((s.peer, s.device) for s in self._sessions)

    def check_invariants(self) -> None:
        """No exclusive device is held twice."""
        with self._lock:
            held = [s.device for s in self._sessions if s.device and self._exclusive(s.device)]
            assert len(held) == len(set(held))
            assert len(self._sessions) <= MAX_SESSIONS

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing:
            try:
                sock, address = listener.accept()
            except OSError as error:
                if not self._closing:  # out of descriptors, or the peer was gone already
                    _log.warning("accept: %s", error.strerror or error)
                    time.sleep(0.1)
                continue
            peer = f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
            if not self._handshakes.acquire(blocking=False):
                _log.warning("%s: closed, too many connections that have not proved the secret", peer)
                sock.close()
                continue
            threading.Thread(target=self._welcome, args=(sock, peer), daemon=True, name=peer).start()

    def _welcome(self, sock: socket.socket, peer: str) -> None:
        """Handshake, then a child; this thread stays with it until it ends."""
        if hasattr(signal, "pthread_sigmask"):  # the child inherits it: Ctrl-C is for the worker alone
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        with sock:
            try:
                keys = handshake.as_server(sock, self._secret.value)
            except HandshakeError as error:
                _log.warning("%s: closed, %s", peer, error)
                return
            finally:
                self._handshakes.release()
            session = self._spawn(sock, peer, keys)
        if session is not None:
            self._attend(session)

    def _spawn(self, sock: socket.socket, peer: str, keys: handshake.SessionKeys) -> Session | None:
        ours, theirs = multiprocessing.Pipe()
        arguments = (sock, keys, theirs, self._options, peer)
        process = multiprocessing.get_context("spawn").Process(target=self._target, args=arguments, name=peer)
        session = Session(peer, process, ours)
        with self._lock:
            if self._closing or len(self._sessions) >= MAX_SESSIONS:
                _log.warning("%s: closed, %d connections are served already", peer, len(self._sessions))
                return None
            process.start()
            self._sessions.add(session)
        theirs.close()
        _log.info("%s: connected", peer)
        return session

    def _attend(self, session: Session) -> None:
        """Answer a child until it ends, and end it when it gives no sign of life."""
        reason, patience = "the connection ended", START_SECONDS
        try:
            while True:
                if not session.control.poll(patience):
                    reason = f"ended, its process gave no sign of life for {patience:.0f} s"
                    break
                patience = SILENCE_SECONDS
                asked = json.loads(session.control.recv_bytes(1 << 16))
                if "claim" in asked:
                    session.control.send_bytes(json.dumps(self._claim(session, str(asked["claim"]))).encode())
        except (OSError, EOFError):
            pass
        except (ValueError, TypeError):
            reason = "ended, its process talks nonsense"
        session.process.kill()
        session.process.join()
        with self._lock:
            self._sessions.discard(session)
            self._lock.notify_all()
        session.control.close()
        if not self._closing:
            code = session.process.exitcode
            _log.info("%s: %s%s", session.peer, reason, f" (exit code {code})" if code else "")

    def _claim(self, session: Session, device: str) -> dict[str, Any]:
        """Give a device to a session, unless another one holds it and it cannot be shared."""

        def holder() -> str | None:
            others = (s for s in self._sessions if s is not session and s.device == device)
            return next((s.peer for s in others if self._exclusive(device)), None)

        with self._lock:
            if not self._lock.wait_for(lambda: holder() is None, RELEASE_SECONDS):
                return {"refused": f"device {device} of this worker is in use by {holder()}"}
            session.device = device
            return {"granted": device}
