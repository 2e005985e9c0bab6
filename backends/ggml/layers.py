"""Everything a device without kernels of our own holds of a stage's layers, and how graphs are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from backends.base import BatchLike
from backends.ggml import attention_layout as layouts
from backends.ggml import endpoint
from backends.ggml.attention_layout import BLOCK_SIZE, GATHERED, Layout, Member, Part
from backends.ggml.capabilities import (
    can_advance_states,
    can_flash_attend,
    can_look_up,
    can_multiply,
    can_multiply_experts,
    can_store,
    unsupported,
)
from backends.ggml.devices import Device, DeviceError
from backends.ggml.graph import GraphBuilder
from backends.ggml.lib import TYPE_F16
from backends.ggml.models.config import ModelConfig
from backends.ggml.paged import KINDS, PADDING, PagedPools
from backends.ggml.paged_graph import PagedGraphBuilder, Upload
from backends.ggml.recurrent_graph import StatePools
from backends.ggml.state_layout import StateLayout, lay_out_states
from backends.ggml.weights import Progress, Weights, is_matrix, look_up
from quant.gguf import GGUFFile
from quant.types import GGML_TYPES

EMBEDDING = "token_embd.weight"


class DeviceLayers:
    """Weights and KV pools of `group_of`'s layers in the device's memory.

    Where the device cannot look up rows of the embedding's format, the host does, and sends them.
    """

    min_rows = 1

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
        host_layers: Sequence[int] = (),
    ):
        """As CpuLayers. The experts of `host_layers` are in main memory, and not among `names`.

        Raises DeviceError for a weight that the device cannot multiply.
        """
        self._host_layers = host_layers
        self._gguf, self._config, self._device = gguf, config, device
        self._host_lookup = lookup and not can_look_up(device, gguf.tensors[EMBEDDING].type)
        held = [n for n in names if n != EMBEDDING or n == head or (lookup and not self._host_lookup)]
        for name in held:
            info = gguf.tensors[name]
            multiplied = is_matrix(info) and (name != EMBEDDING or name == head)
            can = can_multiply if len(info.shape) == 2 else can_multiply_experts
            if multiplied and not can(device, info.type):
                kind = GGML_TYPES[info.type].name
                raise DeviceError(f"device {device.info.name}: cannot multiply by {name}, which is {kind}")
        for kind in kv_types:
            if kind not in KINDS or not can_store(device, KINDS[kind]):
                raise DeviceError(f"device {device.info.name}: cannot store keys and values as {kind}")
        recurrent = [layer for layer in sorted(group_of) if config.is_recurrent(layer)]
        group_of = {layer: g for layer, g in group_of.items() if layer not in recurrent}
        self.states = self._open_states(recurrent, num_states)
        self.flash, self.unpacks = self._how_to_attend(list(group_of), *(KINDS[kind] for kind in kv_types))
        self.weights = Weights(gguf, held, device, progress)
        self.weight_bytes = self.weights.nbytes
        self.kv = PagedPools(config, device, sorted(group_of), group_of, num_blocks, kv_types)
        self._num_blocks = [n + PADDING for n in num_blocks]
        self._windows: list[int | None] = [None] * len(num_blocks)
        for layer, g in group_of.items():
            self._windows[g] = config.layer_windows[layer]
        self.in_place = self.gathered = 0  # parts of steps that were attended so
        self._used = [g in group_of.values() for g in range(len(num_blocks))]

    def _how_to_attend(self, layers: Sequence[int], keys: int, values: int) -> tuple[bool, bool]:
        """(with fused attention, unpacked first) for keys and values of these ggml types in these layers.

        Raises DeviceError where they would have to be unpacked and cannot be.
        """
        c, device = self._config, self._device
        kinds = {c.heads_of(layer) for layer in layers}
        extras = (c.attention_softcap, c.family.sinks)

        def can_flash(key_type: int, value_type: int) -> bool:
            return all(
                can_flash_attend(device, h.dim_k, h.dim_v, c.n_head, h.n, key_type, value_type, *extras)
                for h in kinds
            )

        sure = keys == values or device.info.backend != endpoint.BACKEND  # it says yes to everything
        if sure and can_flash(keys, values):
            return True, False
        unpacked = {kind for kind in (keys, values) if kind != TYPE_F16}
        for kind in unpacked:
            if not can_look_up(device, kind):
                name = GGML_TYPES[kind].name.lower()
                raise DeviceError(f"device {device.info.name}: cannot attend keys or values kept as {name}")
        return bool(unpacked) and can_flash(TYPE_F16, TYPE_F16), bool(unpacked)

    @property
    def kv_bytes(self) -> int:
        """Of keys, values and states."""
        return self.kv.nbytes + (self.states.nbytes if self.states is not None else 0)

    def _open_states(self, layers: Sequence[int], num_states: int) -> StatePools | None:
        sizes = self._config.delta_net
        if not layers or sizes is None:
            return None
        if not can_advance_states(self._device, sizes):
            raise DeviceError(
                f"device {self._device.info.name}: cannot compute this model's recurrent layers (gated delta "
                "nets); name other devices with --device"
            )
        return StatePools(sizes, self._device, layers, num_states)

    def layout(self, batch: BatchLike, rows: int) -> Layout:
        if self.states is None:
            return self._attention_layout(batch, rows)
        states = lay_out_states(batch, self.states.sizes.taps, self.states.nowhere, rows)
        return replace(self._attention_layout(batch, rows), states=states)

    def _attention_layout(self, batch: BatchLike, rows: int) -> Layout:
        if not any(self._used):
            return Layout((), [], None, None)
        in_place = not self.unpacks
        layout = layouts.lay_out(batch, self._windows, self._used, self._num_blocks, rows, in_place)
        for part in layout.parts:
            everywhere = all(v for v, used in zip(part.views, self._used, strict=True) if used)
            self.in_place += everywhere
            self.gathered += not everywhere
        return layout

    def largest_layout(self, rows: int, max_context: int) -> Layout:
        """A step whose graph needs as much memory as any: one sequence as long as can be, gathered."""
        spans = []
        for window, used, blocks in zip(self._windows, self._used, self._num_blocks, strict=True):
            pool = blocks * BLOCK_SIZE
            most = min(pool, max_context or pool)
            if window is not None:
                most = min(most, window + rows + BLOCK_SIZE)
            spans.append(layouts.span_of(max(most, min(GATHERED, pool))) if used else 0)
        part = Part(1, rows, tuple(spans), (False,) * len(spans))
        nothing = np.zeros(1, np.int32)
        member = Member(nothing, [nothing] * len(spans))
        order = np.zeros(rows, np.int32)
        states = None
        if self.states is not None:
            states = StateLayout((((1, rows),),), [], order)
        if not any(self._used):
            return Layout((), [], None, None, states)
        return Layout((part,), [member], order, order, states)

    def new_builder(self, rows: int, layout: Layout) -> PagedGraphBuilder:
        return PagedGraphBuilder(
            self._config,
            self._device,
            self.weights,
            rows,
            self.kv,
            layout,
            self.flash,
            self.unpacks,
            self._host_layers,
            self.states,
        )

    def require_support(self, graph: int) -> None:
        """Raise DeviceError for a graph with an operator that the device lacks."""
        lacking = unsupported(self._device, graph)
        if lacking is not None:
            family = self._config.family.architecture
            raise DeviceError(
                f"device {self._device.info.name}: has no operator {lacking}, which family {family} needs"
            )

    def embed(self, g: GraphBuilder) -> tuple[int, int]:
        """(input of the graph, hidden rows): token ids, or the rows that the host looked up."""
        if not self._host_lookup:
            source = g.input_i32(g.rows)
            return source, g.embed(source, EMBEDDING, self._config.embedding_scale)
        source = g.input_f32(self._config.n_embd, g.rows)
        return source, g.scaled(source, self._config.embedding_scale)

    def token_input(self, ids: np.ndarray) -> np.ndarray:
        """What `embed`'s input takes: int32 [T], or float32 [T, n_embd]."""
        if not self._host_lookup:
            return ids
        return look_up(self._gguf, EMBEDDING, ids)

    def counters(self) -> dict[str, int]:
        return {"attended_in_place": self.in_place, "attended_gathered": self.gathered}

    def set_step(self, g: Any, batch: BatchLike, layout: Layout, upload: Upload) -> None:
        assert isinstance(g, PagedGraphBuilder)
        g.set_step(batch, layout, upload)

    def close(self) -> None:
        self.kv.close()
        if self.states is not None:
            self.states.close()
        self.weights.close()


__all__ = ["DeviceLayers"]
