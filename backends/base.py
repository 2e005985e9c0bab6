"""What the orchestrator expects of a device and of a pipeline stage that lives on one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


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


class BlockCopyLike(Protocol):
    group: int
    src: int
    dst: int


class BatchLike(Protocol):
    """The arrays of hetero.batch.Batch; the shapes are documented there."""

    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: list[np.ndarray]
    block_tables: list[np.ndarray]
    context_lens: np.ndarray
    cu_seqlens_q: np.ndarray
    logits_rows: np.ndarray

    @property
    def copies(self) -> Sequence[BlockCopyLike]: ...


class StageBackend(Protocol):
    """Consecutive layers of a model on one device, with their KV pools."""

    def prepare(self, batch: BatchLike, hidden: np.ndarray | None) -> None:
        """Take in a step's inputs. `hidden` is float32 [T, n_embd], or None for the first stage."""
        ...

    def compute(self) -> np.ndarray:
        """Run the prepared step.

        Returns float32 [T, n_embd], or the logits [L, n_vocab] from the last stage. The array is
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

    def memory(self) -> dict[str, int]:
        """Bytes held, by purpose: weights, kv, compute."""
        ...

    def close(self) -> None: ...
