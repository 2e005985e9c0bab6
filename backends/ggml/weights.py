"""A stage's weights on its device: straight from the mapped file where the device allows it."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from backends.ggml.devices import Device, DeviceError
from backends.ggml.lib import BUFFER_USAGE_WEIGHTS, TYPE_F32, ggml
from backends.ggml.models.delta_net import CONVOLUTION
from quant.gguf import GGUFFile, TensorInfo
from quant.types import row_bytes

HOST_ALIGNMENT = 32  # ggml's CPU kernels expect it of a tensor's first byte
# Smaller tensors are copied: touching one in the mapping can map 2 MiB of the file around it, and norms lie
# among matrices that are nowhere else read from there.
MAPPED_FROM = 256 << 10

Progress = Callable[[int], None]  # called with bytes done since the last call


def is_matrix(info: TensorInfo) -> bool:
    """Whether something is multiplied by the tensor; experts' biases and convolutions have two dimensions."""
    return len(info.shape) > 1 and info.name.endswith(".weight") and not info.name.endswith(CONVOLUTION)


class Weights:
    """ggml tensors of the named weights on one device. `tensor(name)` gives the handle."""

    def __init__(
        self,
        gguf: GGUFFile,
        names: Iterable[str],
        device: Device,
        progress: Progress | None = None,
        buffer_types: Mapping[str, int] | None = None,
    ):
        """`buffer_types` names the tensors that go to another buffer type than the device's own."""
        self._lib = ggml()
        self._gguf = gguf  # keeps the mapping alive: tensors may point into it
        self._tensors: dict[str, int] = {}
        self._buffers: list[int] = []
        self.nbytes = 0
        self._contexts: list[int] = []
        own = buffer_types or {}
        mapped: dict[int, list[TensorInfo]] = {}  # by part of a split model
        copied: dict[int, list[TensorInfo]] = {}
        for info in (gguf.tensors[n] for n in names):
            aligned = device.from_host_ptr and info.offset % HOST_ALIGNMENT == 0
            if info.name not in own and aligned and info.nbytes >= MAPPED_FROM:
                mapped.setdefault(info.part, []).append(info)
            else:
                copied.setdefault(own.get(info.name, device.buffer_type), []).append(info)
        for infos in mapped.values():
            self._place_mapped(infos, device, progress)
        for buffer_type, infos in copied.items():
            self._place_copied(infos, device, buffer_type, progress)

    def tensor(self, name: str) -> int:
        return self._tensors[name]

    def values(self, name: str) -> np.ndarray:
        """float32: a copy, on the host, of a weight that is F32."""
        tensor = self._tensors[name]
        found = np.empty(self._lib.nbytes(tensor) // 4, np.float32)
        self._lib.backend_tensor_get(tensor, found.ctypes.data, 0, found.nbytes)
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def close(self) -> None:
        for buffer in self._buffers:
            self._lib.backend_buffer_free(buffer)
        for context in self._contexts:
            self._lib.free(context)
        self._buffers, self._contexts, self._tensors = [], [], {}

    def _new(self, info: TensorInfo, context: int) -> int:
        shape = [*info.shape, 1, 1, 1][:4]
        tensor = self._lib.new_tensor_4d(context, info.type, *shape)
        self._lib.set_name(tensor, info.name.encode()[:63])
        self._tensors[info.name] = tensor
        self.nbytes += info.nbytes
        return tensor

    def _context(self, count: int) -> int:
        self._contexts.append(self._lib.context(count))
        return self._contexts[-1]

    def _place_mapped(self, infos: list[TensorInfo], device: Device, progress: Progress | None) -> None:
        """`infos` are of one file."""
        context = self._context(len(infos))
        base = self._gguf.tensor_data(infos[0].name).ctypes.data - infos[0].offset
        first = min(i.offset for i in infos) // 4096 * 4096
        last = max(i.offset + i.nbytes for i in infos)
        largest = max(i.nbytes for i in infos)
        buffer = self._lib.backend_dev_buffer_from_host_ptr(
            device.handle, base + first, last - first, largest
        )
        if not buffer:
            raise DeviceError(f"device {device.info.name}: cannot map {last - first} bytes of weights")
        self._buffers.append(buffer)
        self._lib.backend_buffer_set_usage(buffer, BUFFER_USAGE_WEIGHTS)
        for info in infos:
            self._lib.backend_tensor_alloc(buffer, self._new(info, context), base + info.offset)
            if progress:
                progress(info.nbytes)

    def _place_copied(
        self, infos: list[TensorInfo], device: Device, buffer_type: int, progress: Progress | None
    ) -> None:
        context = self._context(len(infos))
        tensors = [self._new(info, context) for info in infos]
        buffer = self._lib.backend_alloc_ctx_tensors_from_buft(context, buffer_type)
        if not buffer:
            raise DeviceError(
                f"device {device.info.name}: no memory for {sum(i.nbytes for i in infos)} bytes of weights"
            )
        self._buffers.append(buffer)
        self._lib.backend_buffer_set_usage(buffer, BUFFER_USAGE_WEIGHTS)
        # read, not mapped, and not from malloc: both could stay in memory when the copy is done
        staging = np.frombuffer(mmap.mmap(-1, max(i.nbytes for i in infos)), np.uint8)
        for info, tensor in zip(infos, tensors, strict=True):
            data = staging[: info.nbytes]
            self._gguf.read_into(info.name, 0, data)
            self._lib.backend_tensor_set(tensor, data.ctypes.data, 0, info.nbytes)
            if progress:
                progress(info.nbytes)


def look_up(gguf: GGUFFile, name: str, ids: np.ndarray) -> np.ndarray:
    """float32 [T, width]: rows of a matrix in the mapped file, of any type."""
    info = gguf.tensors[name]
    rows = gguf.tensor_data(name).reshape(-1, row_bytes(info.type, info.shape[0]))[ids]
    if info.type == TYPE_F32:
        return rows.view(np.float32)
    out = np.empty((len(ids), info.shape[0]), np.float32)
    ggml().get_type_traits(info.type).contents.to_float(rows.ctypes.data, out.ctypes.data, out.size)
    return out


class DeviceTensors:
    """Tensors of our own on a device (KV pools, in types that ggml knows), with whatever the memory holds."""

    def __init__(self, device: Device, shapes: list[tuple[int, int, int]]):
        """`shapes`: ggml type, row length, rows of each tensor. Raises DeviceError for lack of memory."""
        self._lib = lib = ggml()
        self._context = lib.context(max(1, len(shapes)))
        self.handles = [lib.new_tensor_4d(self._context, t, width, rows, 1, 1) for t, width, rows in shapes]
        self._buffer = (
            lib.backend_alloc_ctx_tensors_from_buft(self._context, device.buffer_type) if shapes else None
        )
        if shapes and not self._buffer:
            lib.free(self._context)
            wanted = sum(lib.nbytes(h) for h in self.handles)
            raise DeviceError(f"device {device.info.name}: no memory for {wanted} bytes of KV cache")
        self.nbytes = lib.backend_buffer_get_size(self._buffer) if self._buffer else 0

    def clear(self) -> None:
        """Set everything to zero."""
        if self._buffer:
            self._lib.backend_buffer_clear(self._buffer, 0)

    def close(self) -> None:
        if self._context:
            if self._buffer:
                self._lib.backend_buffer_free(self._buffer)
            self._lib.free(self._context)
        self._context, self._buffer = 0, None
