"""Carries blocks between a stage's pools and its slots in main memory.

On a CPU both are main memory, and blocks are copied at once. On other devices spills are read before anything
else of a step; loads are written while the step computes, by a thread with a stream of work of its own,
where the device can do both at a time.
"""

from __future__ import annotations

import ctypes as C
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Protocol

import numpy as np

from backends.base import BlockMoveLike
from backends.ggml.devices import Device, DeviceError
from backends.ggml.lib import ggml
from backends.ggml.models.config import ModelConfig
from backends.ggml.paged import PagedPools
from backends.host_memory import HostMemory, anonymous, slot_sizes

if TYPE_CHECKING:
    from backends.cpu.pools import CpuKV
    from backends.ggml.stage import StageSpec

Run = tuple[int, int, int, int]  # group, first block, first slot, how many


class Pools(Protocol):
    def parts(self, group: int) -> Sequence[tuple[int, int]]:
        """(where the pool is, bytes of a block) of what a slot holds, in its order: keys and values by layer.

        Where: the address of a pool in main memory, else its tensor.
        """
        ...


def runs(moves: Iterable[BlockMoveLike]) -> list[Run]:
    """The moves in their order, those that follow each other in pool and host memory taken together."""
    found: list[Run] = []
    for move in moves:
        group, block, slot, count = found[-1] if found else (-1, 0, 0, 0)
        if (move.group, move.block, move.slot) == (group, block + count, slot + count):
            found[-1] = group, block, slot, count + 1
        else:
            found.append((move.group, move.block, move.slot, 1))
    return found


class PinnedMemory:
    """Main memory that the device reaches by itself, so that copies run beside everything else.

    An Allocate of host_memory. Where the device's backend offers none, or has no more: ordinary memory.
    """

    def __init__(self, device: Device):
        self._type = ggml().backend_dev_host_buffer_type(device.handle) if device.host_buffer else None
        self._buffers: list[int] = []

    def __call__(self, offset: int, nbytes: int) -> np.ndarray:
        buffer = ggml().backend_buft_alloc_buffer(self._type, nbytes) if self._type else None
        if not buffer:
            return anonymous(offset, nbytes)
        self._buffers.append(buffer)
        base = C.cast(ggml().backend_buffer_get_base(buffer), C.POINTER(C.c_uint8))
        return np.ctypeslib.as_array(base, (nbytes,))

    def close(self) -> None:
        while self._buffers:
            ggml().backend_buffer_free(self._buffers.pop())


class Mover:
    """Moves blocks in memory that this process can copy, at once. `seconds` and `nbytes` are of one step."""

    def __init__(self, pools: Pools, host: HostMemory):
        """`host` is the mover's from here on."""
        self.host = host
        self._parts = [list(pools.parts(group)) for group in range(len(host.slots))]
        self.seconds, self.nbytes = 0.0, 0
        for group, parts in enumerate(self._parts):
            assert not host.slots[group] or sum(size for _, size in parts) == host.slot_bytes(group)

    def begin(self, spills: Sequence[BlockMoveLike]) -> None:
        """A new step: bring its spilled blocks to their slots. They may be overwritten afterwards."""
        self.seconds, self.nbytes = 0.0, 0
        if spills:
            self._timed(runs(spills), True)

    def load(self, loads: Sequence[BlockMoveLike]) -> None:
        """Bring blocks back, by the end of `finish`. All that read or write these blocks has ended."""
        if loads:
            self._timed(runs(loads), False)

    def finish(self) -> None:
        """Wait for the loads. Raises what went wrong with them."""

    def close(self) -> None:
        """Free the host memory. No moves may be under way."""
        self.host.close()

    def _timed(self, moves: list[Run], spill: bool) -> None:
        start = time.perf_counter()
        for group, block, rows in self._places(moves):
            offset = 0
            for where, size in self._parts[group]:
                self._copy(where, size, block, rows, offset, spill)
                offset += size
            self.nbytes += rows.nbytes
        self._wait(spill)
        self.seconds += time.perf_counter() - start

    def _places(self, moves: list[Run]) -> Iterator[tuple[int, int, np.ndarray]]:
        """(group, first block, its slot and those behind it): runs, cut where host memory is in pieces."""
        for group, block, slot, count in moves:
            while count:
                rows = self.host.rows(group, slot, count)
                yield group, block, rows
                block, slot, count = block + len(rows), slot + len(rows), count - len(rows)

    def _copy(self, where: int, size: int, block: int, rows: np.ndarray, offset: int, spill: bool) -> None:
        source = where + block * size
        target, step = rows.ctypes.data + offset, rows.shape[1]
        for i in range(len(rows)):
            here, there = source + i * size, target + i * step
            C.memmove(there if spill else here, here if spill else there, size)

    def _wait(self, spill: bool) -> None:
        """Until what `_copy` has begun is done."""


class DeviceMover(Mover):
    """Moves blocks in a device's own memory through ggml."""

    def __init__(self, pools: Pools, host: HostMemory, device: Device):
        super().__init__(pools, host)
        self._device = device
        self._stream = device.backend  # of loads
        self._thread: ThreadPoolExecutor | None = None
        self._loading: Future[None] | None = None
        if device.asynchronous and any(host.slots):
            self._stream = ggml().backend_dev_init(device.handle, None)
            if not self._stream:
                raise DeviceError(f"device {device.info.name}: cannot be opened twice, for --ram-cache")
            self._thread = ThreadPoolExecutor(1, "loads")

    def begin(self, spills: Sequence[BlockMoveLike]) -> None:
        """See Mover. Of a step that was prepared and never computed, the loads have to end first."""
        if self._loading is not None:
            wait([self._loading])
            self._loading = None
        super().begin(spills)

    def load(self, loads: Sequence[BlockMoveLike]) -> None:
        """See Mover."""
        assert self._loading is None, "the loads of the step before have not ended"
        if loads and self._thread is not None:
            self._loading = self._thread.submit(self._timed, runs(loads), False)
        else:
            super().load(loads)

    def finish(self) -> None:
        """See Mover."""
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.result()

    def close(self) -> None:
        """See Mover."""
        if self._thread is not None:
            self._thread.shutdown()
            ggml().backend_free(self._stream)
            self._thread = None
        super().close()

    def _copy(self, where: int, size: int, block: int, rows: np.ndarray, offset: int, spill: bool) -> None:
        move = ggml().backend_tensor_get_2d_async if spill else ggml().backend_tensor_set_2d_async
        stream = self._device.backend if spill else self._stream
        address, step = rows.ctypes.data + offset, rows.shape[1]
        move(stream, where, address, block * size, size, len(rows), size, step)

    def _wait(self, spill: bool) -> None:
        ggml().backend_synchronize(self._device.backend if spill else self._stream)


def open_mover(
    device: Device, pools: CpuKV | PagedPools, config: ModelConfig, spec: StageSpec, host: HostMemory | None
) -> Mover:
    """A stage's mover, with host memory of its own unless there is some."""
    groups = len(spec.num_blocks)
    if host is None:
        allocate = anonymous if device.is_cpu else PinnedMemory(device)
        host = HostMemory(spec.host_slots or (0,) * groups, slot_sizes(config, spec), allocate)
    return DeviceMover(pools, host, device) if isinstance(pools, PagedPools) else Mover(pools, host)


__all__ = ["DeviceMover", "Mover", "PinnedMemory", "Pools", "Run", "open_mover", "runs"]
