"""Everything a CPU device holds of a stage's layers: weights, KV pools, and how graphs are built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from backends.base import BatchLike
from backends.cpu.graph import CpuGraphBuilder
from backends.cpu.packed import PackedWeights, packable
from backends.cpu.pools import CpuKV
from backends.ggml.attention_layout import Layout
from backends.ggml.devices import Device, DeviceError
from backends.ggml.graph import GraphBuilder
from backends.ggml.lib import ggml
from backends.ggml.models.config import ModelConfig
from backends.ggml.probe import PLAIN, Verdicts, probe, turn_off_tiles
from backends.ggml.weights import Progress, Weights, is_matrix
from quant.gguf import GGUFFile
from quant.types import GGML_TYPES

if TYPE_CHECKING:
    from backends.cpu.states import CpuStates

EMBEDDING = "token_embd.weight"
NO_LAYOUT = Layout((), [], None, None)


class CpuLayers:
    """Matrices whose format our matmul has are repacked for it; the others go to ggml's.

    `min_rows` is the number of rows to which graphs must be padded for ggml's matmuls to give a
    row the same bits in every batch (see ggml/probe.py). 1 when all matrices are ours.
    """

    def __init__(
        self,
        gguf: GGUFFile,
        config: ModelConfig,
        device: Device,
        names: Sequence[str],
        lookup: bool,
        head: str | None,
        group_of: dict[int, int],
        num_blocks: Sequence[int],
        num_states: int,
        kv_types: tuple[str, str],
        progress: Progress | None,
    ):
        """`names`: the stage's tensors. `lookup`: token ids are looked up here. `head`: output matrix.
        `kv_types`: of keys and of values."""
        self._config, self._device = config, device
        matrices = [n for n in names if is_matrix(gguf.tensors[n]) and (n != EMBEDDING or n == head)]
        ours = [n for n in matrices if self._is_ours(gguf, n)]
        theirs = [n for n in matrices if n not in ours]
        verdicts = probe(gguf.tensors[n].type for n in theirs)
        buffers = {t: _choose(verdicts, t, device) for t in {gguf.tensors[n].type for n in theirs}}
        flat = [n for n in theirs if len(gguf.tensors[n].shape) == 2]  # what the verdicts are about
        for type_id in {gguf.tensors[n].type for n in theirs if n not in flat}:
            if verdicts[type_id, PLAIN] > 1:  # and padding does not help: routers set the number of rows
                turn_off_tiles(device, type_id)
        self.min_rows = max((buffers[gguf.tensors[n].type][1] for n in flat), default=1)
        extra = {n: buffers[gguf.tensors[n].type][0] for n in flat if n != EMBEDDING or not lookup}
        plain = [n for n in names if n not in ours]  # packed embeddings are looked up where they are
        self.weights = Weights(gguf, plain, device, progress, {n: b for n, b in extra.items() if b})
        self._packed = PackedWeights(gguf, ours, device.threads, progress)
        self.weight_bytes = self.weights.nbytes + self._packed.nbytes
        recurrent = [layer for layer in sorted(group_of) if config.is_recurrent(layer)]
        attending = [layer for layer in sorted(group_of) if layer not in recurrent]
        self.kv = CpuKV(config, device, self.weights, attending, group_of, num_blocks, kv_types)
        self.states = self._open_states(recurrent, num_states)

    def _open_states(self, layers: Sequence[int], num_states: int) -> CpuStates | None:
        if not layers:
            return None
        from backends.cpu.states import CpuStates  # compiled only for models that have such layers

        sizes = self._config.delta_net
        assert sizes is not None
        return CpuStates(sizes, self._config.norm_eps, self._device, self.weights, layers, num_states)

    @property
    def kv_bytes(self) -> int:
        """Of keys, values and states."""
        return self.kv.nbytes + (self.states.nbytes if self.states is not None else 0)

    def _is_ours(self, gguf: GGUFFile, name: str) -> bool:
        """Whether our matmul multiplies by a matrix."""
        return packable(gguf, name)

    def new_builder(
        self, rows: int, layout: Layout, kind: type[CpuGraphBuilder] = CpuGraphBuilder
    ) -> CpuGraphBuilder:
        return kind(self._config, self._device, self.weights, rows, self.kv, self._packed, self.states)

    def layout(self, batch: BatchLike, rows: int) -> Layout:
        """The kernels read block tables: the shape of a graph does not depend on what is attended."""
        return NO_LAYOUT

    def largest_layout(self, rows: int, max_context: int) -> Layout:
        return NO_LAYOUT

    def require_support(self, graph: int) -> None:
        """Nothing to ask: the CPU has all operators, and ours are compiled for it."""

    def embed(self, g: GraphBuilder) -> tuple[int, int]:
        """(input of the graph, hidden rows)."""
        ids = g.input_i32(g.rows)
        return ids, g.embed(ids, EMBEDDING, self._config.embedding_scale)

    def token_input(self, ids: np.ndarray) -> np.ndarray:
        return ids

    def counters(self) -> dict[str, int]:
        return {}

    def set_step(self, g: GraphBuilder, batch: BatchLike, layout: Layout, upload: object) -> None:
        self.kv.header.set(batch)
        if self.states is not None:
            self.states.set(batch)

    def close(self) -> None:
        self.kv.close()
        if self.states is not None:
            self.states.close()
        self.weights.close()


def _choose(verdicts: Verdicts, type_id: int, device: Device) -> tuple[int | None, int]:
    """(extra buffer type or None, rows needed): an extra one only where it gives each row its own bits."""
    for buffer_type in device.extra_buffer_types():
        if verdicts.get((type_id, ggml().backend_buft_name(buffer_type).decode())) == 1:
            return buffer_type, 1
    rows = verdicts.get((type_id, PLAIN))
    if rows is None:
        raise DeviceError(f"{GGML_TYPES[type_id].name} weights cannot be multiplied on this CPU")
    return None, rows
