"""Carries blocks between a stage's pools and its slots in main memory.

On a CPU both are main memory, and blocks are copied at once. On other devices spills are read before anything
else of a step; loads are written while the step computes, by a thread with a stream of work of its own,
where the device can do both at a time.
"""

from __future__ import annotations

import ctypes as C
import time
import weakref
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
    """The moves in their order; those that lie side by side at both ends, up or down, taken together."""
    found: list[Run] = []
    for move in moves:
        group, block, slot, count = found[-1] if found else (-1, 0, 0, 0)
        if (move.group, move.block, move.slot) == (group, block + count, slot + count):
            found[-1] = group, block, slot, count + 1
        elif (move.group, move.block, move.slot) == (group, block - 1, slot - 1):
            found[-1] = group, block - 1, slot - 1, count + 1
        else:
            found.append((move.group, move.block, move.slot, 1))
    return found


class PinnedMemory:
    """Main memory that the device reaches by itself, so that copies run beside everything else.

    An Allocate of host_memory. Where the device's backend offers none, or has no more: ordinary memory.
    """

    def __init__(self, device: Device):
        self._type = ggml().backend_dev_host_buffer_type(device.handle) if device.host_buffer else None
        self.pieces = 0

    def __call__(self, offset: int, nbytes: int) -> np.ndarray:
        buffer = ggml().backend_buft_alloc_buffer(self._type, nbytes) if self._type else None
        if not buffer:
            return anonymous(offset, nbytes)
        self.pieces += 1
        memory = (C.c_uint8 * nbytes).from_address(ggml().backend_buffer_get_base(buffer))
        weakref.finalize(memory, ggml().backend_buffer_free, buffer).atexit = False  # with its last array
        return np.frombuffer(memoryview(memory), np.uint8)


class Mover(Protocol):
    """Moves a stage's blocks. `host` is its own; `seconds` and `nbytes` are of one step."""

    host: HostMemory
    seconds: float
    nbytes: int

    def begin(self, spills: Sequence[BlockMoveLike]) -> None:
        """A new step: bring its spilled blocks to their slots. They may be overwritten afterwards."""
        ...

    def load(self, loads: Sequence[BlockMoveLike]) -> None:
        """Bring blocks back, by the end of `finish`. All that read or write these blocks has ended."""
        ...

    def finish(self) -> None:
        """Wait for the loads. Raises what went wrong with them."""
        ...

    def close(self) -> None:
        """Free the host memory. No moves may be under way."""
        ...


class MemoryMover:
    """Moves blocks of pools in main memory, at once. See Mover."""

    def __init__(self, pools: Pools, host: HostMemory):
        self.host = host
        self.seconds, self.nbytes = 0.0, 0
        parts = [pools.parts(group) for group in range(len(host.slots))]
        self._pools = [np.array([address for address, _ in group], np.int64) for group in parts]
        self._sizes = [np.array([size for _, size in group], np.int64) for group in parts]
        if any(host.slots):
            from backends.cpu.moves import copy_pieces  # only where it is used

            self._copy = copy_pieces
            for group, sizes in enumerate(self._sizes):
                assert int(sizes.sum()) == host.slot_bytes(group), "slots of another format"
            nothing = np.zeros(0, np.int64)
            copy_pieces(nothing, nothing, nothing, nothing, True)  # compiled now, not in a step

    def begin(self, spills: Sequence[BlockMoveLike]) -> None:
        """See Mover."""
        self.seconds, self.nbytes = 0.0, 0
        self._move(spills, True)

    def load(self, loads: Sequence[BlockMoveLike]) -> None:
        """See Mover."""
        self._move(loads, False)

    def finish(self) -> None:
        """See Mover: nothing is under way."""

    def close(self) -> None:
        """See Mover."""
        self.host.close()

    def _move(self, moves: Sequence[BlockMoveLike], spill: bool) -> None:
        if not moves:
            return
        start = time.perf_counter()
        for group in range(len(self._pools)):
            own = [move for move in moves if move.group == group]
            if own and len(self._pools[group]):
                blocks = np.array([move.block for move in own], np.int64)
                slots = np.array([self.host.place(group, move.slot, 1)[0] for move in own], np.int64)
                self._copy(self._pools[group], self._sizes[group], blocks, slots, spill)
                self.nbytes += len(own) * self.host.slot_bytes(group)
        self.seconds += time.perf_counter() - start


class DeviceMover:
    """Moves blocks in a device's own memory through ggml. See Mover."""

    def __init__(self, pools: Pools, host: HostMemory, device: Device):
        self.host, self._device = host, device
        self.seconds, self.nbytes = 0.0, 0
        self._parts = [pools.parts(group) for group in range(len(host.slots))]
        for group, parts in enumerate(self._parts):
            assert not host.slots[group] or sum(size for _, size in parts) == host.slot_bytes(group)
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
        self.seconds, self.nbytes = 0.0, 0
        if spills:
            self._move(runs(spills), True)

    def load(self, loads: Sequence[BlockMoveLike]) -> None:
        """See Mover."""
        assert self._loading is None, "the loads of the step before have not ended"
        if loads and self._thread is not None:
            self._loading = self._thread.submit(self._move, runs(loads), False)
        elif loads:
            self._move(runs(loads), False)

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
        self.host.close()

    def _move(self, moves: list[Run], spill: bool) -> None:
        lib, start = ggml(), time.perf_counter()
        move = lib.backend_tensor_get_2d_async if spill else lib.backend_tensor_set_2d_async
        stream = self._device.backend if spill else self._stream
        for group, block, address, count in self._places(moves):
            step = self.host.slot_bytes(group)
            self.nbytes += count * step
            for tensor, size in self._parts[group]:
                move(stream, tensor, address, block * size, size, count, size, step)
                address += size
        lib.backend_synchronize(stream)
        self.seconds += time.perf_counter() - start

    def _places(self, moves: list[Run]) -> Iterator[tuple[int, int, int, int]]:
        """(group, first block, address of its slot, how many): runs, cut where host memory is in pieces."""
        for group, block, slot, count in moves:
            while count:
                address, n = self.host.place(group, slot, count)
                yield group, block, address, n
                block, slot, count = block + n, slot + n, count - n


def open_mover(
    device: Device, pools: CpuKV | PagedPools, config: ModelConfig, spec: StageSpec, host: HostMemory | None
) -> Mover:
    """A stage's mover, with host memory of its own unless there is some."""
    groups = len(spec.num_blocks)
    if host is None:
        allocate = anonymous if device.is_cpu else PinnedMemory(device)
        host = HostMemory(spec.host_slots or (0,) * groups, slot_sizes(config, spec), allocate)
    return DeviceMover(pools, host, device) if isinstance(pools, PagedPools) else MemoryMover(pools, host)


__all__ = ["DeviceMover", "MemoryMover", "Mover", "PinnedMemory", "Pools", "Run", "open_mover", "runs"]
