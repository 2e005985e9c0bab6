"""The devices that the loaded ggml offers, and how one is opened."""

from __future__ import annotations

import ctypes as C

import psutil

from backends.base import DeviceInfo
from backends.ggml.lib import DEVICE_KINDS, DeviceProps, GgmlError, ggml


class DeviceError(ValueError):
    """A device that does not exist or cannot be opened; the message is one line for the user."""


def list_devices() -> list[DeviceInfo]:
    """Every device of the loaded ggml, in its order. Raises GgmlError when ggml is missing."""
    lib = ggml()
    return [_info(lib.backend_dev_get(i)) for i in range(lib.backend_dev_count())]


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
        free_bytes=free,
        device_id=props.device_id.decode() if props.device_id else name,
        backend=lib.backend_reg_name(lib.backend_dev_backend_reg(handle)).decode(),
    )


def default_threads() -> int:
    """One thread per physical core that this process may use."""
    allowed = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else None
    physical = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    return max(1, min(physical, allowed or physical))


class Device:
    """An opened ggml device: a backend (a stream of work) and the buffer type it computes from."""

    def __init__(self, info: DeviceInfo, handle: int, threads: int):
        lib = ggml()
        self.info, self.handle, self.threads = info, handle, threads
        self.backend = lib.backend_dev_init(handle, None)
        if not self.backend:
            raise DeviceError(f"device {info.name}: cannot be opened")
        self.buffer_type = lib.backend_dev_buffer_type(handle)
        props = DeviceProps()
        lib.backend_dev_get_props(handle, C.byref(props))
        self.from_host_ptr = bool(props.caps.from_host_ptr)
        set_threads = self._procedure("ggml_backend_set_n_threads", None, C.c_void_p, C.c_int)
        if set_threads is not None:
            set_threads(self.backend, threads)

    @property
    def is_cpu(self) -> bool:
        return self.info.kind == "cpu"

    def extra_buffer_types(self) -> list[int]:
        """Buffer types with their own weight layout (AMX, CPU_REPACK). Unproven: see probe.py."""
        get = self._procedure("ggml_backend_dev_get_extra_bufts", C.POINTER(C.c_void_p), C.c_void_p)
        found: list[int] = []
        if get is not None:
            array = get(self.handle)
            while array and array[len(found)]:
                found.append(array[len(found)])
        return found

    def close(self) -> None:
        if self.backend:
            ggml().backend_free(self.backend)
            self.backend = None

    def _procedure(self, name: str, result, *arguments):
        lib = ggml()
        address = lib.backend_reg_get_proc_address(lib.backend_dev_backend_reg(self.handle), name.encode())
        return C.CFUNCTYPE(result, *arguments)(address) if address else None


def open_device(name: str, threads: int = 0) -> Device:
    """Open a device by the name that `list_devices` gives it. `threads` 0 takes one per core.

    Raises DeviceError naming the devices there are.
    """
    lib = ggml()
    for index in range(lib.backend_dev_count()):
        handle = lib.backend_dev_get(index)
        info = _info(handle)
        if info.name == name:
            return Device(info, handle, threads or default_threads())
    names = ", ".join(d.name for d in list_devices()) or "none"
    raise DeviceError(f"no device named {name}; this machine has: {names}")


__all__ = ["Device", "DeviceError", "GgmlError", "default_threads", "list_devices", "open_device"]
