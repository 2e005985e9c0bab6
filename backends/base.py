"""What the orchestrator expects of a device and of a pipeline stage that lives on one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

BLOCK_SIZE = 16  # tokens of a KV block: one vector of keys in the CPU's kernels
RECURRENT = 0  # in place of an attention window: the layer has no keys and values but a state


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device as `hetero devices` lists it. `kind` is cpu, gpu, igpu or accel; sizes in bytes.

    `device_id` is the stable identity (PCI bus id) where the driver gives one, else the name.
    """

    name: str
    kind: str
    description: str
    total_bytes: int
    free_bytes: int
    device_id: str
    backend: str


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Everything a process needs to open a device. Plain values: `dataclasses.asdict` gives JSON.

    `name` is as list_devices has it; of a device behind an endpoint or a worker, as that one names it.
    """

    name: str
    device_id: str = ""  # must still be the device's when it is opened; "": not checked
    threads: int = 0  # of a CPU; 0: one per core
    cores: tuple[int, ...] = ()  # of a CPU: its threads run on these alone; (): wherever
    endpoint: str = ""  # HOST:PORT of the ggml RPC server that has the device
    worker: str = ""  # HOST:PORT of the `hetero worker` that has the device


class KVHeads(NamedTuple):
    """Key and value heads of a layer; `dim_k` is that of query heads, too."""

    n: int
    dim_k: int
    dim_v: int


class ModelSizes(Protocol):
    """What the other end of a stage has to know of its model."""

    @property
    def n_layer(self) -> int: ...
    @property
    def n_embd(self) -> int: ...
    @property
    def n_vocab(self) -> int: ...
    def heads_of(self, layer: int) -> KVHeads: ...
    def kv_layer(self, layer: int) -> int:
        """The layer whose keys and values a layer attends: mostly itself."""
        ...


class StageLost(RuntimeError):
    """The process or machine behind a stage is gone, and the KV contents with it. One line for the user."""


class BlockCopyLike(Protocol):
    group: int
    src: int
    dst: int


class BlockMoveLike(Protocol):
    group: int
    block: int
    slot: int


class BatchLike(Protocol):
    """The arrays of hetero.batch.Batch; the shapes are documented there."""

    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: list[np.ndarray]
    block_tables: list[np.ndarray]
    context_lens: np.ndarray
    cu_seqlens_q: np.ndarray
    logits_rows: np.ndarray

    state_sources: np.ndarray
    state_writes: np.ndarray

    @property
    def copies(self) -> Sequence[BlockCopyLike]: ...

    @property
    def spills(self) -> Sequence[BlockMoveLike]: ...

    @property
    def loads(self) -> Sequence[BlockMoveLike]: ...

    @property
    def only_argmax(self) -> bool: ...

    @property
    def embeds(self) -> bool: ...


class HostMemoryView(Protocol):
    """A stage's slots in main memory, for this process to read and write. See backends.host_memory.

    A slot is the caller's as long as no step that moves it is in flight.
    """

    def slot_bytes(self, group: int) -> int:
        """Bytes of a slot of a KV group; 0 where the stage has no layer of it."""
        ...

    def view(self, group: int, slot: int) -> np.ndarray:
        """The slot's bytes, uint8 [slot_bytes(group)]. From any thread. LookupError once the stage is closed;
        views that are still there then stay good."""
        ...


class StageBackend(Protocol):
    """Consecutive layers of a model on one device, with their KV pools."""

    def prepare(self, batch: BatchLike, hidden: np.ndarray | None) -> None:
        """Take in a step's inputs. `hidden` is float32 [T, n_embd], or None for the first stage.

        Moves blocks as hetero.batch.Step has it; with the result of `compute` all moves have ended. A step
        may have moves alone: no token, and an empty result.
        """
        ...

    def compute(self) -> np.ndarray:
        """Run the prepared step.

        Returns float32 [T, n_embd], or the logits [L, n_vocab] from the last stage; none, [0, n_vocab], where
        the batch wants `only_argmax` and it is known: they are most of what a stage hands on. From a batch
        that `embeds` it gives no logits but all rows [T, n_embd], behind the model's last norm. The array is
        overwritten only after as many further calls as steps can be in flight, the result of a
        pipeline of one stage by the next call.
        """
        ...

    @property
    def argmax(self) -> np.ndarray | None:
        """int32 [L]: the last call's largest logits (lowest id of equals, -1: not finite), if known."""
        ...

    @property
    def graph_seconds(self) -> float:
        """Time that the device computed in the last call."""
        ...

    @property
    def move_seconds(self) -> float:
        """Time that the last step's spills and loads took, be it while the device computed."""
        ...

    @property
    def moved_bytes(self) -> int:
        """Bytes that they moved."""
        ...

    @property
    def host_memory(self) -> HostMemoryView | None:
        """The stage's slots, where this process can reach them. A stage that was lost comes with new ones."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes held, by purpose: weights, kv, compute, and host: the most that slots can take."""
        ...

    def counters(self) -> dict[str, int]:
        """How often things happened since the start, such as parts of steps attended in place."""
        ...

    def check(self) -> None:
        """Exchange a few bytes with the device, between steps. Raises StageLost, or what else goes wrong."""
        ...

    def close(self) -> None: ...
