"""The far end of a stage's channel, and the child process that runs one.

One thread reads: it answers PING at once, however long a step takes, and so tells a stopped process from
a busy one. The thread that called serve_stage opens the stage and computes, always the same one, because
OpenMP keeps a team of workers for every thread that has computed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from backends.base import StageBackend
from backends.ggml.stage import StageSpec
from backends.host_memory import HostMemory, slot_sizes
from hetero.pipeline.channel import Channel, ChannelClosed, Kind, Message, WireError
from hetero.pipeline.messages import one_line, read_device, read_stage, read_step
from hetero.pipeline.pipe import PipeChannel, Ring
from hetero.pipeline.shared_memory import SharedRegion

LOG_WARN, LOG_ERROR = 3, 4  # enum ggml_log_level
Report = Callable[[int], None]  # bytes of weights that were loaded
OpenStage = Callable[[dict[str, Any], Report], StageBackend]


def serve_stage(channel: Channel, open_stage: OpenStage, on_lost: Callable[[], None] = lambda: None) -> None:
    """Open a stage and run its steps as the messages say, until CLOSE or until the other end is gone.

    `open_stage` gets the header of OPEN; what it raises goes back as one line. `on_lost` is called by the
    reading thread as soon as the other end is gone, also in the middle of a step. Raises WireError for a
    message that makes no sense.
    """
    inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(channel, inbox, on_lost), name="reader", daemon=True)
    reader.start()
    server = _Server(channel, open_stage)
    try:
        while (message := inbox.get()) is not None:
            with contextlib.suppress(ChannelClosed):  # the reader notices it as well, and ends the loop
                server.answer(message)
    finally:
        server.close()
    reader.join()


def _read(channel: Channel, inbox: queue.SimpleQueue[Message | None], on_lost: Callable[[], None]) -> None:
    try:
        while (message := channel.receive()) is None or message.kind != Kind.CLOSE:
            if message is not None and message.kind == Kind.PING:
                channel.send(Kind.PONG, {})
            elif message is not None:
                inbox.put(message)
    except (ChannelClosed, WireError) as error:
        if isinstance(error, WireError):
            with contextlib.suppress(ChannelClosed):
                channel.send(Kind.LOG, {"text": f"garbage came: {one_line(error)}", "fatal": True})
        on_lost()
    inbox.put(None)


class _Server:
    """The stage behind a channel, once it is open."""

    def __init__(self, channel: Channel, open_stage: OpenStage):
        self._channel, self._open_stage = channel, open_stage
        self._stage: StageBackend | None = None
        self._spec: StageSpec | None = None
        self._width = 0

    def answer(self, message: Message) -> None:
        try:
            if message.kind == Kind.OPEN and self._stage is None:
                self._open(message.header)
            elif message.kind == Kind.STEP and self._stage is not None:
                self._step(message, self._stage)
            elif message.kind == Kind.CHECK and self._stage is not None:
                self._stage.check()
                self._channel.send(Kind.CHECKED, {})
            else:
                raise WireError(f"{message.kind.name} is out of place")
        except (ChannelClosed, WireError):  # who sends what is no step is not served any more
            raise
        except Exception as error:  # the near end decides what that means
            known = isinstance(error, OSError | ValueError | RuntimeError | MemoryError)
            text = one_line(error) if known else f"{type(error).__name__}: {one_line(error)}"
            self._channel.send(Kind.FAILED, {"text": text})

    def close(self) -> None:
        if self._stage is not None:
            self._stage.close()

    def _open(self, header: dict[str, Any]) -> None:
        self._spec, self._width = read_stage(header), int(header.get("width", 0))
        self._stage = self._open_stage(header, self._report)
        self._channel.send(Kind.OPENED, {"memory": self._stage.memory()})

    def _report(self, nbytes: int) -> None:
        self._channel.send(Kind.PROGRESS, {"bytes": nbytes})

    def _step(self, message: Message, stage: StageBackend) -> None:
        assert self._spec is not None
        batch, hidden = read_step(message, self._spec, self._width)
        stage.prepare(batch, hidden)
        rows, argmax = stage.compute(), stage.argmax
        header = {
            "step": message.header.get("step"), "argmax": argmax is not None,
            "graph_seconds": stage.graph_seconds, "counters": stage.counters(),
            "move_seconds": stage.move_seconds, "moved_bytes": stage.moved_bytes,
        }  # fmt: skip
        self._channel.send(Kind.RESULT, header, [rows] if argmax is None else [rows, argmax])


def open_from_file(header: dict[str, Any], report: Report, region: SharedRegion | None) -> StageBackend:
    """The stage that OPEN asks for: the model by its path, the device of this process.

    `region`: the memory of its host slots, where it is shared with the near end.
    """
    import backends.cpu.jit  # noqa: F401  first of all numba code: it says where compiled code is kept
    from backends.ggml.devices import open_device
    from backends.ggml.models.config import read_config
    from backends.ggml.stage import GgmlStage
    from backends.llama.spec import read_spec
    from quant.gguf import open_gguf

    gguf, spec = open_gguf(Path(header["model"])), read_stage(header)
    if "llama" in header:
        from backends.llama.stage import open_stage

        return open_stage(gguf, spec, read_spec(header["llama"]), report)
    config = read_config(gguf)
    host = None if region is None else HostMemory(spec.host_slots, slot_sizes(config, spec), region)
    return GgmlStage(gguf, config, open_device(read_device(header)), spec, report, host)


def main(
    connection: Connection, rings: list[tuple[int, int, str]], limit: int, region: SharedRegion | None
) -> None:
    """A child process: one stage, and gone as soon as the parent is.

    `rings` has (slots, bytes, name) of the shared memory for what comes in and for what goes out, or
    nothing; `limit` is the largest payload that may come. `region` as in open_from_file.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the server drains first, and then ends its children
        signal.signal(number, signal.SIG_IGN)
    incoming, outgoing = [Ring(*ring) for ring in rings] or (None, None)
    channel = PipeChannel(connection, outgoing, incoming, limit, connection.close)
    null = os.open(os.devnull, os.O_RDWR)  # what drivers print is not for the server's terminal
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.environ["GGML_NO_BACKTRACE"] = "1"  # it would start a debugger
    try:
        keep = send_ggml_log(channel)
        serve_stage(channel, partial(open_from_file, region=region), on_lost=lambda: os._exit(0))
        del keep
    except WireError as error:
        with contextlib.suppress(ChannelClosed):
            channel.send(Kind.LOG, {"text": f"garbage came: {one_line(error)}", "fatal": True})
    except Exception as error:
        with contextlib.suppress(ChannelClosed):
            channel.send(Kind.FAILED, {"text": one_line(error)})
    os._exit(0)  # threads of a driver must not keep it


def send_ggml_log(channel: Channel) -> list[Any]:
    """Have warnings of ggml, and the assertion that ends the process, go to the near end.

    The result must be kept alive.
    """
    from backends.ggml.lib import ggml

    def send(text: bytes, fatal: bool) -> None:
        with contextlib.suppress(ChannelClosed):
            line = text.decode("utf-8", "replace").strip()
            channel.send(Kind.LOG, {"text": one_line(line), "fatal": fatal})

    log_type = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    log = log_type(lambda level, text, data: send(text, False) if level in (LOG_WARN, LOG_ERROR) else None)
    abort = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda text: send(text, True))
    ggml().log_set(ctypes.cast(log, ctypes.c_void_p), None)
    ggml().set_abort_callback(ctypes.cast(abort, ctypes.c_void_p))
    return [log, abort]
