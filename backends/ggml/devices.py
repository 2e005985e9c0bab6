"""The devices that the loaded ggml offers, and how one is opened."""

from __future__ import annotations

import ctypes as C
import re
from typing import Any

import psutil

from backends.base import DeviceInfo, DeviceSpec
from backends.ggml import endpoint
from backends.ggml.lib import DEVICE_KINDS, DeviceError, DeviceProps, GgmlError, P, ggml, procedure
from backends.ggml.threads import allowed_cores, default_threads, pin_thread, threadpool_params

PCI_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")


def list_devices() -> list[DeviceInfo]:
    """Every device of the loaded ggml, in its order. Raises GgmlError when ggml is missing."""
    return [_info(handle) for handle in _handles()]


def backend_names() -> frozenset[str]:
    """Backends that this ggml has, whether or not they found a device: CPU, CUDA, Vulkan, …

    A backend that could not start (no driver, a bad setting) counts when its library is there.
    """
    lib = ggml()
    loaded = {lib.backend_reg_name(lib.backend_reg_get(i)).decode() for i in range(lib.backend_reg_count())}
    libraries = {"cuda": "CUDA", "hip": "ROCm", "vulkan": "Vulkan", "sycl": "SYCL", "musa": "MUSA"}
    return frozenset(loaded) | {
        name for stem, name in libraries.items() if any(lib.folder.glob(f"*ggml-{stem}*"))
    }


def _handles() -> list[int]:
    lib = ggml()
    return [lib.backend_dev_get(i) for i in range(lib.backend_dev_count())]


def _info(handle: int) -> DeviceInfo:
    lib, props = ggml(), DeviceProps()
    lib.backend_dev_get_props(handle, C.byref(props))
    kind = DEVICE_KINDS.get(props.type, "accel")
    free, total = props.memory_free, props.memory_total
    if kind == "cpu":  # ggml reports the installed memory as free
        memory = psutil.virtual_memory()
        free, total = memory.available, memory.total
    name = props.name.decode()
    return DeviceInfo(
        name=name,
        kind=kind,
        description=props.description.decode(),
        total_bytes=total,
        free_bytes=min(free, total),
        device_id=props.device_id.decode().lower() if props.device_id else name,
        backend=lib.backend_reg_name(lib.backend_dev_backend_reg(handle)).decode(),
    )


class Device:
    """An opened ggml device: a backend (a stream of work) and the buffer type it computes from.

    `cores` are those that a CPU device's threads keep to; () where they are not pinned. `from_host_ptr`:
    the device can compute on memory that we mapped; `asynchronous`: it computes while we go on;
    `host_buffer`: its backend offers main memory that the device reaches by itself.
    """

    def __init__(self, info: DeviceInfo, handle: int, threads: int, cores: tuple[int, ...] = ()):
        lib = ggml()
        self.info, self.handle, self.threads = info, handle, threads
        self.cores = cores if self.is_cpu and allowed_cores() else ()
        self.backend = lib.backend_dev_init(handle, None)
        if not self.backend:
            raise DeviceError(f"device {info.name}: cannot be opened")
        self.buffer_type = lib.backend_dev_buffer_type(handle)
        props = DeviceProps()
        lib.backend_dev_get_props(handle, C.byref(props))
        self.from_host_ptr = bool(props.caps.from_host_ptr)
        self.asynchronous = bool(props.caps.asynchronous)
        self.host_buffer = bool(props.caps.host_buffer)
        self._threadpool: int | None = None
        set_threads = self._procedure("ggml_backend_set_n_threads", None, P, C.c_int)
        if set_threads is not None:
            set_threads(self.backend, threads)
        if self.is_cpu:
            self._make_threadpool()

    @property
    def is_cpu(self) -> bool:
        return self.info.kind == "cpu"

    def pin_thread(self) -> None:
        """Called by a thread that is about to compute on this device: keep it on the device's cores.

        Costs next to nothing when the thread is there already.
        """
        pin_thread(self.cores)

    def extra_buffer_types(self) -> list[int]:
        """Buffer types with their own weight layout (AMX, CPU_REPACK). Unproven: see probe.py."""
        get = self._procedure("ggml_backend_dev_get_extra_bufts", C.POINTER(P), P)
        found: list[int] = []
        if get is not None:
            array = get(self.handle)
            while array and array[len(found)]:
                found.append(array[len(found)])
        return found

    def close(self) -> None:
        """Free the device. A thread that closes it is no longer kept on its cores."""
        pin_thread(())
        if self.backend:
            ggml().backend_free(self.backend)
            self.backend = None
        if self._threadpool:
            self._procedure("ggml_threadpool_free", None, P)(self._threadpool)
            self._threadpool = None

    def _make_threadpool(self) -> None:
        """Threads that outlive a graph: a build without OpenMP would start new ones for each."""
        create = self._procedure("ggml_threadpool_new", P, P)
        attach = self._procedure("ggml_backend_cpu_set_threadpool", None, P, P)
        if create is None or attach is None:
            return
        params = threadpool_params(self.threads, self.cores)
        self._threadpool = create(C.byref(params))
        attach(self.backend, self._threadpool)

    def _procedure(self, name: str, result: Any, *arguments: Any) -> Any:
        return procedure(ggml().backend_dev_backend_reg(self.handle), name, result, *arguments)


def open_device(spec: DeviceSpec | str, threads: int = 0) -> Device:
    """Open a device, given by spec or by the name that `list_devices` gives it.

    With a `device_id` the device is found by that, whatever it is called by now. `threads` counts where
    the spec has none; 0 takes one per core. Raises DeviceError naming the devices there are. A device
    behind an RPC endpoint is opened here too, and then ends this process when it fails: see endpoint.py.
    """
    if isinstance(spec, str):
        spec = DeviceSpec(spec, threads=threads)
    if spec.worker:
        raise DeviceError(f"device {spec.name}: belongs to the worker {spec.worker}")
    if spec.endpoint:
        return _open_remote(spec)
    strangers = set(spec.cores) - set(allowed_cores() or spec.cores)
    if strangers:
        raise DeviceError(f"device {spec.name}: this process may not run on core {min(strangers)}")
    found = [(handle, _info(handle)) for handle in _handles()]
    meant = [(handle, info) for handle, info in found if _is_meant(info, spec)]
    # parts of a card (AMD's partitions) share its id, and then go by name
    for handle, info in sorted(meant, key=lambda pair: pair[1].name != spec.name):
        return Device(info, handle, spec.threads or threads or default_threads(), spec.cores)
    who = spec.name if spec.device_id in ("", spec.name) else f"{spec.name} ({spec.device_id})"
    names = ", ".join(_label(info) for _, info in found) or "none"
    raise DeviceError(f"device {who} is not there; this machine has: {names}")


def _is_meant(info: DeviceInfo, spec: DeviceSpec) -> bool:
    if PCI_ID.match(spec.device_id):  # names change with the order in which a driver finds its cards
        return info.device_id == spec.device_id and _api(info.name) == _api(spec.name)
    return info.name == spec.name and spec.device_id in ("", info.device_id)


def _api(name: str) -> str:
    return name.rstrip("0123456789")


def _label(info: DeviceInfo) -> str:
    return info.name if info.device_id == info.name else f"{info.name} ({info.device_id})"


def _open_remote(spec: DeviceSpec) -> Device:
    endpoint.require_reachable(spec.endpoint)
    handles = endpoint.device_handles(spec.endpoint)
    for index, handle in enumerate(handles):
        if spec.name == f"RPC{index}":
            return Device(endpoint.endpoint_info(handle, spec.endpoint, index), handle, threads=0)
    raise DeviceError(f"rpc={spec.endpoint}: has {len(handles)} devices, and no {spec.name}")


__all__ = [
    "Device",
    "DeviceError",
    "GgmlError",
    "backend_names",
    "default_threads",
    "list_devices",
    "open_device",
]
