"""Devices of another machine behind ggml's RPC server (`rpc-server` of llama.cpp).

ggml ends the whole process (GGML_ABORT) when it cannot reach a server, when the server speaks another
version of the protocol, and when it vanishes later. So an endpoint is first tried with a plain connection,
its devices are listed by a child process, and a stage on one of them belongs in a process of its own.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import multiprocessing
import os
import re
import socket

from backends.base import DeviceInfo
from backends.ggml.lib import STR, DeviceError, DeviceProps, GgmlError, P, ggml, procedure

BACKEND = "RPC"  # what ggml calls all of these devices
CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 15.0  # for the child process: start, connect, ask


def split_address(address: str) -> tuple[str, int]:
    """HOST and PORT of "HOST:PORT" or "[IPv6]:PORT". Raises DeviceError."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[^:\[\]/\s]+):([0-9]{1,5})", address)
    if match is None or not 0 < int(match[2]) < 65536:
        raise DeviceError(f"{address!r} is not HOST:PORT")
    return match[1].strip("[]"), int(match[2])


def endpoint_devices(endpoint: str) -> list[DeviceInfo]:
    """The devices behind an endpoint, named RPC0, RPC1, … in its order, with their memory.

    The protocol tells nothing else of them. Raises DeviceError; never ends this process.
    """
    require_reachable(endpoint)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_describe, args=(sender, endpoint), daemon=True)
    child.start()
    sender.close()
    try:
        if not receiver.poll(ANSWER_SECONDS):
            raise DeviceError(f"rpc={endpoint}: does not answer; it serves one client at a time")
        answer = json.loads(receiver.recv_bytes())
    except EOFError:
        raise DeviceError(
            f"rpc={endpoint}: not a ggml RPC server, or one of another version than this ggml "
            f"({ggml().version().decode()})"
        ) from None
    finally:
        child.kill()
        child.join()
        receiver.close()
    if isinstance(answer, str):
        raise DeviceError(answer)
    return [DeviceInfo(**device) for device in answer]


def require_reachable(endpoint: str) -> None:
    """Raise DeviceError unless something accepts connections there."""
    host, port = split_address(endpoint)
    if ":" in host:
        raise DeviceError(f"rpc={endpoint}: ggml's RPC speaks IPv4 only; give an IPv4 address")
    try:
        # IPv4 as ggml itself: a name that answers on IPv6 alone would end the process
        address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4]
        with socket.create_connection((str(address[0]), port), CONNECT_SECONDS):
            return
    except TimeoutError:
        reason = f"no answer within {CONNECT_SECONDS:g} s"
    except OSError as exc:
        reason = exc.strerror or str(exc)
    raise DeviceError(f"rpc={endpoint}: cannot connect: {reason}")


def device_handles(endpoint: str) -> list[int]:
    """ggml's handles of the endpoint's devices. Ends the process when the server fails meanwhile.

    They are not entered in ggml's list of devices: listing that would then depend on the endpoint.
    """
    lib = ggml()
    for i in range(lib.backend_reg_count()):
        add_server = procedure(lib.backend_reg_get(i), "ggml_backend_rpc_add_server", P, STR)
        if add_server is not None:
            server = add_server(endpoint.encode())
            count = lib.backend_reg_dev_count(server) if server else 0
            return [lib.backend_reg_dev_get(server, n) for n in range(count)]
    raise DeviceError(f"rpc={endpoint}: this ggml was built without RPC (-DGGML_RPC=ON)")


def endpoint_info(handle: int, endpoint: str, index: int) -> DeviceInfo:
    """What the server says of a device. ggml numbers RPC devices through all endpoints; we do not."""
    props = DeviceProps()
    ggml().backend_dev_get_props(handle, ctypes.byref(props))
    return DeviceInfo(
        name=f"RPC{index}",
        kind="gpu",
        description=f"device {index} of the RPC server at {endpoint}",
        total_bytes=props.memory_total,
        free_bytes=min(props.memory_free, props.memory_total),
        device_id=f"{endpoint}/RPC{index}",
        backend=BACKEND,
    )


def _describe(sender, endpoint: str) -> None:
    """In the child: send the devices, or why there are none. What ggml says as it aborts goes nowhere."""
    os.environ["GGML_NO_BACKTRACE"] = "1"  # else ggml starts a debugger first
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    try:
        handles = device_handles(endpoint)
        answer: object = [
            dataclasses.asdict(endpoint_info(handle, endpoint, i)) for i, handle in enumerate(handles)
        ]
    except (DeviceError, GgmlError) as exc:
        answer = str(exc)
    sender.send_bytes(json.dumps(answer).encode())
