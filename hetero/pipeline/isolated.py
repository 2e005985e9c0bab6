"""A stage in a child process: what ends that one, ends nothing here. See channel_stage."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import signal
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from backends.base import DeviceSpec, HostMemoryView, ModelSizes
from backends.ggml.stage import StageSpec
from backends.host_memory import HostMemory, slot_sizes
from backends.llama.spec import LlamaSpec
from hetero.pipeline import child
from hetero.pipeline.channel import ChannelClosed, Kind
from hetero.pipeline.channel_stage import OPENING_SECONDS, ChannelStage
from hetero.pipeline.messages import largest_result, largest_step, open_header
from hetero.pipeline.pipe import PipeChannel, Ring
from hetero.pipeline.shared_memory import SharedRegion
from hetero.processes import without_interrupts

log = logging.getLogger(__name__)

OPENING_RPC_SECONDS = 60.0  # without a byte of progress over the network: the other machine may be lost
CLOSE_SECONDS = 3.0

_processes: weakref.WeakSet[multiprocessing.process.BaseProcess] = weakref.WeakSet()


@atexit.register
def _kill_children() -> None:
    """Runs before multiprocessing's own handler, which would wait for them."""
    for process in list(_processes):
        process.kill()


class IsolatedStage(ChannelStage):
    """A stage in a child process, which opens model and device itself. See ChannelStage.

    `shared_memory` False sends all arrays through the pipe, as happens where there is too little of it.
    `share_host` False leaves the host slots to the child alone, which then can have memory that its device
    reaches by itself. With `llama` libllama computes all layers, and on its devices.
    """

    def __init__(
        self,
        model: Path,
        config: ModelSizes,
        device: DeviceSpec,
        spec: StageSpec,
        label: str = "",
        progress: Callable[[int], None] | None = None,
        *,
        shared_memory: bool = True,
        share_host: bool = True,
        llama: LlamaSpec | None = None,
    ):
        step_bytes, result_bytes = largest_step(spec, config.n_embd), largest_result(spec, config)
        self._rings: list[Ring] = []
        if shared_memory:
            self._rings = _rings(spec.depth + 1, (step_bytes, result_bytes))
        self._host, self._region = _shared_host(config, spec) if share_host else (None, None)
        context = multiprocessing.get_context("spawn")
        connection, theirs = context.Pipe()
        names = [(r.slots, r.slot_bytes, r.name) for r in self._rings]
        arguments = (theirs, names, step_bytes, self._region)
        self._process = context.Process(target=child.main, args=arguments, daemon=False)
        try:
            with without_interrupts():
                self._process.start()
                _processes.add(self._process)
        except BaseException:
            self._free(connection)
            raise
        finally:
            theirs.close()
        outgoing, incoming = self._rings or (None, None)
        channel = PipeChannel(connection, outgoing, incoming, result_bytes, self._process.kill)
        try:
            opening = open_header(str(model), device, spec, config.n_embd, llama)
            network = any(d.endpoint for d in (device, *(llama.devices if llama else ())))
            patience = OPENING_RPC_SECONDS if network else OPENING_SECONDS
            name = label or device.name
            super().__init__(channel, opening, spec, config, name, progress, patience, network)
        except BaseException:
            self._end()
            self._free(connection)
            raise
        self._unlink()

    @property
    def host_memory(self) -> HostMemoryView | None:
        """See base.StageBackend."""
        return self._host

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return self._process.pid

    def close(self) -> None:
        """End the child: by asking, then by force."""
        if self._process.is_alive() and self.lost is None:
            self.lost = f"device {self.label} is closed"
            with contextlib.suppress(ChannelClosed):
                self.channel.send(Kind.CLOSE, {})
            self._process.join(CLOSE_SECONDS)
        self._end()
        super().close()
        if self._host is not None:
            self._host.close()

    def _end(self) -> None:
        self._process.kill()
        self._process.join(CLOSE_SECONDS)  # or longer, if a driver holds it in the kernel
        _processes.discard(self._process)

    def _unlink(self) -> None:
        for ring in self._rings:
            ring.unlink()
        if self._region is not None:
            self._region.unlink()

    def _free(self, connection: Any) -> None:
        connection.close()
        self._unlink()
        for ring in self._rings:
            ring.close()
        if self._host is not None:
            self._host.close()

    def _why_closed(self) -> str:
        self._process.join(1.0)
        code = self._process.exitcode
        return "its process ended" if code is None or code == 0 else f"its process ended ({_exit_text(code)})"


def _shared_host(config: ModelSizes, spec: StageSpec) -> tuple[HostMemory | None, SharedRegion | None]:
    """The stage's host slots in memory that the child gets too; none where it cannot be had."""
    if not any(spec.host_slots):
        return None, None
    sizes = slot_sizes(config, spec)
    own = HostMemory(spec.host_slots, sizes)
    if not own.nbytes:  # the slots are of groups that have no layer here
        return own, None
    try:
        region = SharedRegion(own.nbytes)
    except OSError as error:
        log.warning("a stage keeps its blocks in main memory to itself: %s", error)
        return None, None
    return HostMemory(spec.host_slots, sizes, region), region


def _rings(slots: int, sizes: Collection[int]) -> list[Ring]:
    """Shared memory for both directions: for the largest messages, else for smaller ones, else none."""
    for share in (1, 4, 16):
        rings: list[Ring] = []
        try:
            for size in sizes:
                rings.append(Ring(slots, max(1, size // share)))
            return rings
        except OSError as error:
            log.info("too little shared memory for a stage: %s", error)
            for ring in rings:
                ring.close()
    return []


def _exit_text(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"
