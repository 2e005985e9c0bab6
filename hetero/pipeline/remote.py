"""A stage on another machine, behind its `hetero worker`.

handshake                                        both ends prove the secret: handshake.py
worker  HELLO    {"version", "devices": [...]}   what it offers, with free memory as it is now
server  WEIGHTS  {"sha256", "size"}              the part of the model that the stage needs: part.py
worker  WANTED   {"bytes"}                       0: it has them; otherwise
server  CHUNK*   arrays: one u1, at most 4 MiB   all of them, then WANTED {"bytes": 0} again
server  OPEN, then as with any stage             messages.py; "model" is the SHA-256
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from backends.base import DeviceInfo, DeviceSpec
from backends.ggml.devices import DeviceError
from backends.ggml.endpoint import split_address
from backends.ggml.models.config import ModelConfig
from backends.ggml.stage import StageSpec
from hetero import __version__
from hetero.pipeline import handshake
from hetero.pipeline.channel import ChannelClosed, Kind, Message, WireError
from hetero.pipeline.channel_stage import ChannelStage
from hetero.pipeline.messages import largest_result, one_line, open_header
from hetero.pipeline.part import ModelPart
from hetero.pipeline.wire import SocketChannel
from hetero.sizes import format_size

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 60.0  # for what takes the worker a start of a process, or a flush of its disk
SMALL = 1 << 16  # bytes of payload, before results come
_log = logging.getLogger(__name__)


class RemoteStage(ChannelStage):
    """Layers on a worker's device. See ChannelStage; opening it raises DeviceError, with one line.

    `device` has the worker's address and the device's name there. `progress` gets each byte of weights
    once: as it is sent, or else as it is loaded.
    """

    def __init__(
        self,
        part: ModelPart,
        config: ModelConfig,
        device: DeviceSpec,
        spec: StageSpec,
        secret: bytes,
        label: str = "",
        progress: Callable[[int], None] | None = None,
    ):
        name = label or f"worker={device.worker}/{device.name}"
        sha256 = part.sha256()  # first: it takes a while, and the worker waits for nobody
        channel, _ = connect(device.worker, secret)
        try:
            with _explained(device.worker):
                if _send_part(channel, part, sha256, device.worker, progress):
                    progress = None
            channel.max_payload, channel.keep = largest_result(spec, config), spec.depth + 1
            opening = open_header(sha256, replace(device, worker=""), spec, config.n_embd)
            with _explained(device.worker):
                super().__init__(channel, opening, spec, config, name, progress)
        except BaseException:
            channel.close()
            raise

    def _why_closed(self) -> str:
        assert isinstance(self.channel, SocketChannel)
        return self.channel.failure or "its connection was closed"


def describe(address: str, secret: bytes) -> list[DeviceInfo]:
    """The devices that a worker offers. Raises DeviceError, with one line, when it cannot be asked."""
    channel, devices = connect(address, secret)
    with contextlib.suppress(ChannelClosed):
        channel.send(Kind.CLOSE, {})
    channel.close()
    return devices


def connect(address: str, secret: bytes) -> tuple[SocketChannel, list[DeviceInfo]]:
    """A connection to the worker at HOST:PORT, and what it offers. Raises DeviceError."""
    host, port = split_address(address)
    try:
        sock = socket.create_connection((host, port), CONNECT_SECONDS)
    except OSError as error:
        reason = "timed out" if isinstance(error, TimeoutError) else error.strerror or error
        raise DeviceError(f"worker {address}: {reason}; is `hetero worker` running there?") from None
    try:
        keys = handshake.as_client(sock, secret)
        channel = SocketChannel(sock, keys, SMALL)
    except (OSError, handshake.HandshakeError) as error:
        sock.close()
        raise DeviceError(f"worker {address}: {one_line(error)}") from None
    try:
        with _explained(address):
            hello = _expect(channel, Kind.HELLO).header
            if hello.get("version") != __version__:
                raise DeviceError(
                    f"it runs hetero {one_line(hello.get('version'))[:20]}, this is {__version__}; "
                    "both ends must be the same version"
                )
            return channel, _devices(hello)
    except BaseException:
        channel.close()
        raise


def _send_part(
    channel: SocketChannel,
    part: ModelPart,
    sha256: str,
    address: str,
    progress: Callable[[int], None] | None,
) -> bool:
    """Have the worker hold this part of the model. Whether it had to be sent."""
    channel.send(Kind.WEIGHTS, {"sha256": sha256, "size": part.nbytes})
    if _expect(channel, Kind.WANTED).header.get("bytes") == 0:
        return False
    _log.info("worker %s: sending %s of weights, which it keeps", address, format_size(part.nbytes))
    for chunk in part.chunks():
        channel.send(Kind.CHUNK, {}, [chunk])
        if progress is not None:
            progress(len(chunk))
    if _expect(channel, Kind.WANTED).header.get("bytes") != 0:
        raise WireError("it wants the weights twice")
    return True


def _expect(channel: SocketChannel, kind: Kind) -> Message:
    """The next message, of this kind. Raises DeviceError with the worker's line if it refuses."""
    message = channel.receive(ANSWER_SECONDS)
    if message is None:
        raise ChannelClosed(f"no answer for {ANSWER_SECONDS:.0f} s")
    if message.kind == Kind.FAILED:
        raise DeviceError(one_line(message.header.get("text", "")))
    if message.kind != kind:
        raise WireError(f"{message.kind.name} where {kind.name} was due")
    return message


def _devices(header: dict[str, Any]) -> list[DeviceInfo]:
    """The devices of a HELLO. Raises WireError."""
    known = {f.name: str(f.type) for f in fields(DeviceInfo)}
    found = header.get("devices")
    if not isinstance(found, list):
        raise WireError("HELLO without devices")
    types = {"str": str, "int": int}
    for device in found:
        right = isinstance(device, dict) and device.keys() == known.keys()
        if not right or any(type(device[name]) is not types[kind] for name, kind in known.items()):
            raise WireError("HELLO with a device that is none")
    return [DeviceInfo(**device) for device in found]


@contextlib.contextmanager
def _explained(address: str):
    """What goes wrong before the stage is open, as one line that names the worker."""
    try:
        yield
    except (ChannelClosed, WireError, DeviceError) as error:
        raise DeviceError(f"worker {address}: {one_line(error)}") from None
