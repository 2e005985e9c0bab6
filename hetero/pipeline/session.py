"""What `hetero worker` runs, in a process of its own, for a connection that has proved the secret."""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from backends.base import DeviceInfo, DeviceSpec, StageBackend
from backends.ggml.models.config import ModelConfig, read_config
from backends.ggml.stage import GgmlStage, StageSpec, device_weights
from backends.host_memory import HostMemory, slot_sizes
from hetero import __version__
from hetero.pipeline.channel import ChannelClosed, Kind, Message, WireError
from hetero.pipeline.child import send_ggml_log, serve_stage
from hetero.pipeline.handshake import SessionKeys
from hetero.pipeline.messages import largest_step, read_device, read_stage
from hetero.pipeline.wire import SocketChannel
from hetero.plan.devices import list_devices
from hetero.plan.host import free_memory
from hetero.sizes import format_size
from hetero.worker.cache import CacheError, PartCache
from quant.gguf import GGUFFile, open_gguf

MAX_CHUNK = 4 << 20  # bytes of a model in one message
IDLE_SECONDS = 60.0  # a server that says nothing for so long has gone; usually it sends a PING each second
BEAT_SECONDS = 1.0
_log = logging.getLogger("hetero.worker")


class Refused(ValueError):
    """What the other end asks for cannot be had: one line for it."""


def run(
    sock: socket.socket, keys: SessionKeys, control: Connection, options: dict[str, Any], peer: str
) -> None:
    """Serve one stage until the other end goes. `options` is as commands.worker makes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all; the worker ends us
    logging.basicConfig(level=options["log_level"], format="%(levelname)s %(name)s: %(message)s")
    os.environ["GGML_NO_BACKTRACE"] = "1"  # it would start a debugger
    parent = Parent(control)
    channel = SessionChannel(sock, keys, MAX_CHUNK, IDLE_SECONDS)
    try:
        _serve(channel, parent, options, peer)
    except (WireError, ChannelClosed) as error:
        channel.failure = channel.failure or str(error)
    end(channel, peer)


def end(channel: SessionChannel, peer: str) -> None:
    """Say how it ended, and go at once: threads of a step or of a driver must not keep what they hold."""
    if channel.failure and not channel.ended_cleanly:
        _log.warning("%s: closed, %s", peer, channel.failure)
    logging.shutdown()
    os._exit(0)


class SessionChannel(SocketChannel):
    """Bounds what the other end may have under way, once `allowed` is set.

    Without that, more messages than there are buffers would be written over one that has passed its
    checks and is being computed from.
    """

    def __init__(self, sock: socket.socket, keys: SessionKeys, max_payload: int, idle_seconds: float):
        super().__init__(sock, keys, max_payload, idle_seconds=idle_seconds)
        self.allowed: int | None = None
        self.under_way = 0
        self._counting = threading.Lock()

    def receive(self, timeout: float | None = None) -> Message | None:
        """See Channel. Raises WireError for one message too many."""
        message = super().receive(timeout)
        if message is not None and message.kind not in (Kind.PING, Kind.CLOSE) and self.allowed is not None:
            with self._counting:
                self.under_way += 1
            if self.under_way > self.allowed:
                self.failure = f"more than {self.allowed} messages before an answer"
                self.abort()
                raise WireError(self.failure)
        return message

    def send(self, kind: Kind, header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """See Channel."""
        if kind in (Kind.OPENED, Kind.RESULT, Kind.CHECKED, Kind.FAILED):
            with self._counting:
                self.under_way -= 1
        super().send(kind, header, arrays)


class Parent:
    """The worker's process: hears each second that this one lives, grants devices, and takes us with it."""

    def __init__(self, control: Connection):
        self._control = control
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._sending = threading.Lock()
        threading.Thread(target=self._beat, daemon=True, name="parent").start()

    def claim(self, device: str) -> None:
        """Have a device to ourselves. Raises Refused."""
        self._send({"claim": device})
        answer = self._answers.get()
        if "refused" in answer:
            raise Refused(answer["refused"])

    def _beat(self) -> None:
        try:
            while True:
                self._send({})
                if self._control.poll(BEAT_SECONDS):
                    self._answers.put(json.loads(self._control.recv_bytes()))
        except (OSError, EOFError):
            os._exit(1)

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            self._control.send_bytes(json.dumps(message).encode())


def _serve(channel: SessionChannel, parent: Parent, options: dict[str, Any], peer: str) -> None:
    devices = {d.name: d for d in list_devices() if d.name in options["devices"]}
    channel.send(Kind.HELLO, {"version": __version__, "devices": [asdict(d) for d in devices.values()]})
    try:
        path = receive_part(channel, PartCache(Path(options["cache"]), options["cache_size"]))
    except CacheError as error:
        _log.warning("%s: refused, %s", peer, error)
        channel.send(Kind.FAILED, {"text": str(error)})
        return
    opener = Opener(channel, parent, path, devices, options["threads"])
    channel.allowed, channel.under_way = 1, 0
    keep = send_ggml_log(channel)
    serve_stage(channel, opener.open, on_lost=lambda: end(channel, peer))
    del keep


class Opener:
    """Opens the stage that OPEN asks for, from the part of the model that has come, on an offered device."""

    def __init__(
        self,
        channel: SessionChannel,
        parent: Parent,
        path: Path,
        devices: dict[str, DeviceInfo],
        threads: int,
    ):
        self._channel, self._parent, self._path = channel, parent, path
        self._devices, self._threads = devices, threads

    def open(self, header: dict[str, Any], report: Callable[[int], None]) -> StageBackend:
        """Raises Refused, and what opening a model and a stage raises."""
        spec, asked = read_stage(header), read_device(header)
        name = asked.name
        if header.get("model") != self._path.stem:
            raise WireError("OPEN for another model than the one that was sent")
        device = self._devices.get(name)
        if device is None:
            raise Refused(f"device {name} is not offered; there is {', '.join(self._devices)}")
        if spec.host_experts:  # its size is not known to whoever plans
            raise Refused(f"device {name}: a worker keeps no experts in its main memory")
        gguf = open_gguf(self._path)
        config = read_config(gguf, (spec.first, spec.last))
        if header.get("width") != config.n_embd:
            raise WireError("OPEN with another width than the model's")
        self._parent.claim(name)
        _require_room(gguf, config, spec, device)
        import backends.cpu.jit  # noqa: F401  first of all numba code: it says where compiled code is kept
        from backends.ggml.devices import open_device

        threads = min(asked.threads or self._threads, self._threads) if device.kind == "cpu" else 0
        opened = open_device(DeviceSpec(name, asked.device_id, threads))  # never one behind another address
        stage = GgmlStage(gguf, config, opened, spec, report)
        channel = self._channel
        channel.max_payload, channel.allowed = largest_step(spec, config.n_embd), spec.depth + 1
        channel.keep = channel.allowed
        return stage


def _require_room(gguf: GGUFFile, config: ModelConfig, spec: StageSpec, device: DeviceInfo) -> None:
    """Raises Refused where the device, or the main memory beside it, has too little left for the stage."""
    needed, slots, free = _needed(gguf, config, spec), _slot_bytes(config, spec), _free_bytes(device.name)
    if needed > free:
        raise Refused(
            f"device {device.name} has {format_size(free)} free, the layers and their KV cache need "
            f"{format_size(needed)}"
        )
    left = free - needed if device.kind == "cpu" else free_memory()
    if slots > left:
        raise Refused(
            f"device {device.name}: its machine has {format_size(left)} of main memory left, the blocks that "
            f"--ram-cache would keep there need {format_size(slots)}"
        )


def _free_bytes(name: str) -> int:
    """As it is now, after the last one that held the device has gone."""
    return next((device.free_bytes for device in list_devices() if device.name == name), 0)


def _needed(gguf: GGUFFile, config: ModelConfig, spec: StageSpec) -> int:
    """Bytes of the stage's weights, KV pools and states. Raises WireError where a layer has none."""
    states, groups = 0, len(spec.num_blocks)
    for layer in range(spec.first, spec.last):
        group = spec.group_of.get(layer, -1)
        if config.delta_net is not None and config.is_recurrent(layer):
            good = group == groups and spec.num_states > 1
            states += spec.num_states * config.delta_net.state_bytes
        else:
            good = 0 <= group < groups
        if not good:
            raise WireError("a layer without KV blocks, or without states")
    pools = sum(n * size for n, size in zip(spec.num_blocks, slot_sizes(config, spec), strict=True))
    weights = device_weights(config, gguf, spec.first, spec.last)
    return sum(gguf.tensors[name].nbytes for name in weights) + pools + states


def _slot_bytes(config: ModelConfig, spec: StageSpec) -> int:
    """Of main memory, when all host slots are in use."""
    slots = spec.host_slots or (0,) * len(spec.num_blocks)
    return HostMemory(slots, slot_sizes(config, spec)).nbytes


def receive_part(channel: SessionChannel, cache: PartCache) -> Path:
    """Where the part of a model lies that the other end announces, once it is here as a whole.

    Raises CacheError, WireError for a message out of order, ChannelClosed.
    """
    header = _expect(channel, Kind.WEIGHTS).header
    sha256, size = header.get("sha256"), header.get("size")
    if not isinstance(sha256, str) or type(size) is not int or not 0 < size < 1 << 50:
        raise WireError("WEIGHTS without a name and a size")
    path = cache.find(sha256, size)
    if path is None:
        with cache.receive(sha256, size) as incoming:
            channel.send(Kind.WANTED, {"bytes": size})
            while not incoming.complete:
                for data in _expect(channel, Kind.CHUNK).arrays:
                    incoming.write(data.tobytes())
            path = incoming.finish()
    channel.send(Kind.WANTED, {"bytes": 0})
    return path


def _expect(channel: SessionChannel, kind: Kind) -> Message:
    """The next message, which must be of this kind."""
    message = channel.receive(IDLE_SECONDS)
    if message is None:
        raise ChannelClosed(f"nothing came for {IDLE_SECONDS:.0f} s")
    if message.kind == Kind.CLOSE:
        channel.ended_cleanly = True
        raise ChannelClosed("closed by the other end")
    if message.kind != kind:
        raise WireError(f"{message.kind.name} where {kind.name} was due")
    return message
