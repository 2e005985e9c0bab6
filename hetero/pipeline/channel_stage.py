"""The near end of a stage that lives elsewhere.

ggml ends its process when an RPC peer vanishes and on most errors of a driver. What must survive that is
on this side; the stage is on the other.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from backends.base import BatchLike, HostMemoryView, ModelSizes, StageLost
from backends.ggml.devices import DeviceError
from backends.ggml.stage import StageError, StageSpec
from backends.host_memory import slot_sizes
from hetero.pipeline import deadlines
from hetero.pipeline.channel import Channel, ChannelClosed, Kind, Message, WireError
from hetero.pipeline.messages import (
    counts_of,
    moves_of,
    one_line,
    result_of,
    step_arrays,
)

log = logging.getLogger(__name__)

PING_SECONDS = 1.0
SILENT_PINGS = 3  # unanswered, and the other end counts as stopped, a ping later
OPENING_PINGS = 60  # while it starts, which can keep its reader from the interpreter
OPENING_SECONDS = 600.0  # without a byte of progress; the first start on a machine compiles kernels
DEVICE_SECONDS = 3.0  # for a few bytes
_SOURCE = re.compile(r"^.*?\.\w{1,4}:\d+: ")  # where in ggml: for the log, not for a user

_AWAITED = {
    Kind.OPENED: "it was not opened", Kind.RESULT: "a step has not ended",
    Kind.CHECKED: "its device does not answer",
}  # fmt: skip


class ChannelStage:
    """A stage behind a channel. See backends.base.StageBackend.

    Opens it: raises DeviceError when the far end cannot, with its one line. Everything raises StageLost once
    the far end is gone, does not answer for 4 s, or takes far longer over a step than ever; the channel is
    then aborted, and what the stage held is lost. `label` is the device's name in those lines. One thread
    drives the stage; `check` may be called from another.
    """

    def __init__(
        self,
        channel: Channel,
        opening: dict[str, Any],
        spec: StageSpec,
        config: ModelSizes,
        label: str,
        progress: Callable[[int], None] | None = None,
        opening_seconds: float = OPENING_SECONDS,
        network: bool = False,
    ):
        self.channel, self.spec, self.label = channel, spec, label
        self.is_last = spec.last == config.n_layer
        self._n_embd, self._n_vocab = config.n_embd, config.n_vocab
        self.argmax: np.ndarray | None = None
        self.graph_seconds = self.move_seconds = 0.0
        self.moved_bytes = 0
        self.lost: str | None = None
        self._counters: dict[str, int] = {}
        self._deadlines = deadlines.Deadlines(network)
        self._busy = threading.Lock()  # held from prepare to the end of compute, and by check
        self._slot_bytes = slot_sizes(config, spec)
        # tokens, bytes to move, result's shape, whether the largest logits are enough, when it was sent
        self._pending: tuple[int, int, tuple[int, int], bool, float] | None = None
        self._sending_since: float | None = None
        self._last_words = ""  # of an assertion
        self._progress = progress or (lambda nbytes: None)
        self._step_id = 0
        self._send(Kind.OPEN, opening)
        message = self._await((Kind.OPENED, Kind.FAILED), opening_seconds, OPENING_PINGS)
        if message.kind == Kind.FAILED:
            raise DeviceError(_text(message))
        try:
            self._memory = counts_of(message, "memory")
        except WireError as error:
            raise self._lose(str(error)) from None

    def prepare(self, batch: BatchLike, hidden: np.ndarray | None) -> None:
        """See base.StageBackend."""
        if self._pending is not None:  # nobody wants its result
            self.compute()
        self._busy.acquire()
        try:
            self._require()
            self._step_id += 1
            header = {
                "step": self._step_id, "groups": len(batch.slot_mapping), "hidden": hidden is not None,
                "only_argmax": batch.only_argmax, "embeds": batch.embeds,
            }  # fmt: skip
            tokens = len(batch.positions)
            logits = self.is_last and not batch.embeds
            shape = (len(batch.logits_rows), self._n_vocab) if logits else (tokens, self._n_embd)
            moved = sum(self._slot_bytes[move.group] for move in (*batch.spills, *batch.loads))
            self._pending = tokens, moved, shape, batch.only_argmax, time.monotonic()
            self._send(Kind.STEP, header, step_arrays(batch, hidden))
        except BaseException:
            self._pending = None
            self._busy.release()
            raise

    def compute(self) -> np.ndarray:
        """See base.StageBackend. Raises StageError when the device failed but lives, else StageLost."""
        assert self._pending is not None, "no step was prepared"
        (tokens, moved, shape, only_argmax, start), self._pending = self._pending, None
        try:
            limit = self._deadlines.seconds(tokens) + moved / deadlines.MOVED_BYTES
            message = self._await((Kind.RESULT, Kind.FAILED), limit, SILENT_PINGS)
        finally:
            self._busy.release()
        if tokens and not moved:
            self._deadlines.observe(tokens, time.monotonic() - start)
        if message.kind == Kind.FAILED:
            raise StageError(_text(message))
        try:
            if message.header.get("step") != self._step_id:
                raise WireError("the result of another step")
            result, self.argmax, self.graph_seconds = result_of(message, *shape, only_argmax)
            self.move_seconds, self.moved_bytes = moves_of(message)
            self._counters = counts_of(message, "counters")
        except WireError as error:
            raise self._lose(str(error)) from None
        return result

    @property
    def host_memory(self) -> HostMemoryView | None:
        """See base.StageBackend: what is on another machine is out of reach."""
        return None

    def memory(self) -> dict[str, int]:
        return dict(self._memory)

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def check(self) -> None:
        """Ask a stage that has nothing to do whether process and device are still there.

        Raises StageLost. Of one that is busy, it only ends a send that hangs.
        """
        self._require()
        since = self._sending_since
        if since is not None and time.monotonic() - since > deadlines.STEP_SECONDS:
            self.channel.abort()
        if self._busy.acquire(blocking=False):
            try:
                self._check_device()
            finally:
                self._busy.release()

    def close(self) -> None:
        """End the far end's stage. Idempotent; no step may be in flight."""
        if self.lost is None:
            self.lost = f"device {self.label} is closed"
            with contextlib.suppress(ChannelClosed):
                self.channel.send(Kind.CLOSE, {})
        self.channel.close()

    def check_invariants(self) -> None:
        assert self._pending is None or self._busy.locked()
        self._deadlines.check_invariants()

    def _require(self) -> None:
        if self.lost is not None:
            raise StageLost(self.lost)

    def _lose(self, why: str) -> StageLost:
        if self.lost is None:
            self.lost = f"device {self.label} was lost: {self._last_words or why}"
            self.channel.abort()
        return StageLost(self.lost)

    def _send(self, kind: Kind, header: dict[str, Any], arrays: Collection[np.ndarray] = ()) -> None:
        self._sending_since = time.monotonic()
        try:
            self.channel.send(kind, header, list(arrays))
        except ChannelClosed:
            raise self._lose(self._why_closed()) from None
        finally:
            self._sending_since = None

    def _check_device(self) -> None:
        self._send(Kind.CHECK, {})
        message = self._await((Kind.CHECKED, Kind.FAILED), DEVICE_SECONDS, SILENT_PINGS - 1)
        if message.kind == Kind.FAILED:
            raise self._lose(_text(message))

    def _why_closed(self) -> str:
        return "its connection was closed"

    def _await(self, kinds: Collection[Kind], limit: float, pings: int) -> Message:
        """The next message of one of `kinds`. Waits `limit` seconds, from the last PROGRESS on; time that
        this process itself was stopped for does not count."""
        waited, silent = 0.0, 0
        while True:
            start = time.monotonic()
            try:
                message = self.channel.receive(min(PING_SECONDS, max(0.0, limit - waited)))
            except (ChannelClosed, WireError) as error:
                gone = isinstance(error, ChannelClosed)
                raise self._lose(self._why_closed() if gone else f"it sent garbage: {error}") from None
            waited += min(time.monotonic() - start, 2 * PING_SECONDS)
            if message is None:
                if silent >= pings:
                    raise self._lose(f"no answer for {silent + 1} s")
                if waited >= limit:
                    what = _AWAITED[next(iter(kinds))]
                    raise self._lose(f"{what} after {limit:.0f} s")
                self._send(Kind.PING, {})
                silent += 1
                continue
            silent = 0
            if message.kind in kinds:
                return message
            if message.kind == Kind.PROGRESS:
                waited = 0.0
            self._take_in(message)

    def _take_in(self, message: Message) -> None:
        nbytes = message.header.get("bytes")
        if message.kind == Kind.PROGRESS and type(nbytes) is int:
            self._progress(nbytes)
        elif message.kind == Kind.LOG:
            if message.header.get("fatal"):
                self._last_words = _SOURCE.sub("", _text(message))
            log.warning("device %s: %s", self.label, _text(message))
        elif message.kind != Kind.PONG:
            raise self._lose(f"it sent garbage: {message.kind.name} is out of place")


def _text(message: Message) -> str:
    return one_line(message.header.get("text", ""))


__all__ = ["ChannelStage"]
