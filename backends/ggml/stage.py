"""Consecutive layers of a model on one ggml device: weights, KV pools and one graph per shape."""

from __future__ import annotations

import ctypes
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from backends.base import BatchLike
from backends.ggml.attention_layout import Layout, bucket
from backends.ggml.devices import Device, DeviceError
from backends.ggml.graph import GraphBuilder, padded
from backends.ggml.host_experts import HostExperts, Pieces, host_layers, host_tensors
from backends.ggml.lib import STATUS_SUCCESS, ggml, shape_of
from backends.ggml.models.block import build_block, build_embeddings, build_head
from backends.ggml.models.config import ModelConfig, layer_tensors
from backends.ggml.models.layer_inputs import EMBEDDINGS, build_layer_inputs
from backends.ggml.models.tensors import EMBEDDING, HEAD, end_tensors, host_tables
from backends.ggml.moves import open_mover
from backends.ggml.weights import Progress, look_up
from backends.host_memory import HostMemory
from quant.gguf import GGUFFile

if TYPE_CHECKING:
    from backends.cpu.layers import CpuLayers
    from backends.ggml.layers import DeviceLayers

MAX_GRAPHS = 96  # shapes kept; a graph's metadata is a few hundred KiB


class StageError(RuntimeError):
    """The device failed during a step; what the step computed is lost."""


@dataclass(frozen=True, slots=True)
class StageSpec:
    """What a stage holds: layers [first, last), and how large its steps can get.

    `group_of[layer]` is the layer's KV group, `num_blocks[group]` the size of that group's pools.
    `depth` is the number of steps in flight: so many results must stay valid side by side. No sequence
    has more than `max_context` tokens; 0: as many as the pools. `key_type` and `value_type` are of
    backends.kv_format.KV_TYPES. `host_slots[group]` blocks of a group have room in host memory; (): none.
    Of the model's layers with experts the first `host_experts` keep these in main memory, where
    `host_threads` threads multiply by them (0: one per core); on a CPU all are there anyway.
    `num_states` slots hold states of recurrent layers, whose group is the one behind all in `num_blocks`.
    """

    first: int
    last: int
    group_of: dict[int, int]
    num_blocks: tuple[int, ...]
    max_tokens: int
    max_logits: int
    depth: int = 1
    max_context: int = 0
    key_type: str = "f16"
    value_type: str = "f16"
    host_slots: tuple[int, ...] = ()
    host_experts: int = 0
    host_threads: int = 0
    num_states: int = 0


@dataclass(slots=True)
class _Graph:
    builder: GraphBuilder
    source: int  # token ids, or hidden rows of the stage before
    keep: int | None  # rows whose logits are wanted
    output: int
    argmax: int | None  # of the logits
    looked_up: dict[str, int]  # inputs: rows of matrices that are in no memory of the device
    embeds: bool = False  # it gives rows behind the last norm in place of logits
    pieces: Pieces | None = None  # where the step leaves the device in between
    view: np.ndarray | None = None  # the output's memory, where results are used in place

    def close(self) -> None:
        if self.pieces is not None:
            self.pieces.close()
        ggml().free(self.builder.context)


def stage_weights(config: ModelConfig, gguf: GGUFFile, first: int, last: int) -> list[str]:
    """Names of the tensors that layers [first, last) need, with embedding and head at the ends."""
    names = [name for i in range(first, last) for name in layer_tensors(config, i)]
    return names + list(end_tensors(config, gguf.tensors, first == 0, last == config.n_layer))


def device_weights(config: ModelConfig, gguf: GGUFFile, first: int, last: int) -> list[str]:
    """Those of `stage_weights` that the device has; rows of the others are looked up in the mapped file."""
    multiplied = first == 0 or (last == config.n_layer and HEAD not in gguf.tensors)
    tables = {*host_tables(config)} - ({EMBEDDING} if multiplied else set())
    return [name for name in stage_weights(config, gguf, first, last) if name not in tables]


class GgmlStage:
    """Runs steps of its layers. Not thread-safe: one worker drives it. See base.StageBackend."""

    def __init__(
        self,
        gguf: GGUFFile,
        config: ModelConfig,
        device: Device,
        spec: StageSpec,
        progress: Progress | None = None,
        host: HostMemory | None = None,
    ):
        """`host`: the memory of the spec's host slots, where it is not to be of the stage's own making."""
        self._lib, self._gguf = ggml(), gguf
        self.config, self.device, self.spec = config.for_context(spec.max_context), device, spec
        self.is_first, self.is_last = spec.first == 0, spec.last == config.n_layer
        self._head = "output.weight" if "output.weight" in gguf.tensors else "token_embd.weight"
        self._host_experts: HostExperts | None = None
        self._layers = self._open(gguf, progress)
        self._mover = open_mover(device, self._layers.kv, self.config, spec, host)
        self._graphs: OrderedDict[tuple, _Graph] = OrderedDict()
        self._alive: list[np.ndarray] = []  # what the device may still be reading
        self._allocator = self._lib.gallocr_new(device.buffer_type)
        # the largest graph first: its compute buffer then serves all the others
        low = self._layers.min_rows
        rows = max(low, spec.max_tokens)
        largest = self._graph(
            rows,
            max(low, spec.max_logits) if self.is_last else 0,
            self._layers.largest_layout(rows, spec.max_context),
        )
        self._layers.require_support(largest.builder.graph)
        width = config.n_vocab if self.is_last else config.n_embd
        rows = spec.max_logits if self.is_last else spec.max_tokens
        # with a single stage a result is used before the next step starts
        in_place = device.is_cpu and self.is_first and self.is_last
        self._outputs = (
            None if in_place else [np.empty((rows, width), np.float32) for _ in range(spec.depth + 1)]
        )
        self._embeddings: list[np.ndarray] = []  # likewise, once embeddings are asked for
        # and the number of rows of its result; no graph: a step of moves alone
        self._prepared: tuple[_Graph | None, int] | None = None
        self._only_argmax = False  # is asked for of that step
        self._tokens = 0  # of that step
        self.graph_seconds = 0.0  # of the last step
        self.argmax: np.ndarray | None = None  # likewise

    def prepare(self, batch: BatchLike, hidden: np.ndarray | None) -> None:
        """See base.StageBackend. Keeps the calling thread on the device's cores, if it has its own."""
        self.device.pin_thread()
        tokens, embeds = len(batch.positions), self.is_last and batch.embeds
        logits = len(batch.logits_rows) if self.is_last and not embeds else 0
        if not tokens:
            self._move(batch)
            self._prepared = None, 0
            return
        low = self._layers.min_rows
        rows = bucket(tokens, low, self.spec.max_tokens)
        layout = self._layers.layout(batch, rows)
        graph = self._graph(rows, bucket(logits, low, self.spec.max_logits), layout, embeds)
        self._move(batch)
        self._layers.set_step(graph.builder, batch, layout, self._set)
        if self.is_first:
            self._set(graph.source, self._layers.token_input(padded(batch.input_ids, rows)))
        else:
            assert hidden is not None and hidden.shape == (tokens, self.config.n_embd)
            self._set(graph.source, np.ascontiguousarray(hidden))
        for name, tensor in graph.looked_up.items():
            self._set(tensor, look_up(self._gguf, name, padded(batch.input_ids, rows)))
        if graph.keep is not None:
            self._set(graph.keep, padded(batch.logits_rows, shape_of(graph.keep)[0]))
        self._prepared = graph, logits if self.is_last and not embeds else tokens
        self._tokens = tokens
        self._only_argmax = batch.only_argmax

    def compute(self) -> np.ndarray:
        """See base.StageBackend. Raises StageError when the device fails."""
        assert self._prepared is not None, "no step was prepared"
        (graph, count), self._prepared = self._prepared, None
        try:
            return self._compute(graph, count)
        finally:
            self._mover.finish()

    def _compute(self, graph: _Graph | None, count: int) -> np.ndarray:
        self.argmax, self.graph_seconds = None, 0.0
        if graph is None:
            return np.empty((0, self.config.n_vocab if self.is_last else self.config.n_embd), np.float32)
        start = time.perf_counter()
        self._run(graph, count)
        if graph.argmax is not None:
            self.argmax = np.empty(count, np.int32)
            self._get(graph.argmax, self.argmax)
        result = self._result(graph, 0 if self._only_argmax and self.argmax is not None else count)
        self._lib.backend_synchronize(self.device.backend)
        self.graph_seconds = time.perf_counter() - start
        self._alive.clear()
        return result

    def _run(self, graph: _Graph, count: int) -> None:
        """Give the graph to the device, in pieces with the CPU's experts in between where it has such."""
        pieces = [graph.builder.graph] if graph.pieces is None else graph.pieces.graphs
        seams = () if graph.pieces is None else graph.pieces.seams
        for piece, seam in zip(pieces, [*seams, None], strict=True):
            status = self._lib.backend_graph_compute_async(self.device.backend, piece)
            if status != STATUS_SUCCESS:
                raise StageError(f"device {self.device.info.name}: ggml status {status}")
            if seam is not None:
                assert self._host_experts is not None
                self._host_experts.run(self.device, seam, count if seam.kept else self._tokens)

    @property
    def move_seconds(self) -> float:
        return self._mover.seconds

    @property
    def moved_bytes(self) -> int:
        return self._mover.nbytes

    @property
    def host_memory(self) -> HostMemory | None:
        return self._mover.host if any(self.spec.host_slots) else None

    def memory(self) -> dict[str, int]:
        return {
            "weights": self._layers.weight_bytes,
            "kv": self._layers.kv_bytes,
            "compute": self._lib.gallocr_get_buffer_size(self._allocator, 0),
            "experts": 0 if self._host_experts is None else self._host_experts.nbytes,
            "host": self._mover.host.nbytes,
        }

    def counters(self) -> dict[str, int]:
        """See base.StageBackend."""
        return self._layers.counters()

    def check(self) -> None:
        """See base.StageBackend. ggml ends the process when a driver or an RPC server is gone."""
        graph = next(reversed(self._graphs.values()))
        self._get(graph.output, np.empty(1, np.float32))
        self._lib.backend_synchronize(self.device.backend)

    def close(self) -> None:
        """Free everything on the device. The stage cannot be used afterwards."""
        self._free_graphs()
        self._lib.gallocr_free(self._allocator)
        self._mover.close()
        self._layers.close()
        if self._host_experts is not None:
            self._host_experts.close()
        self.device.close()

    def _open(self, gguf: GGUFFile, progress: Progress | None) -> CpuLayers | DeviceLayers:
        """Weights, KV pools and graph builder, as this device's kernels call for."""
        from backends.ggml.layers import DeviceLayers

        spec, kind = self.spec, self._kind()
        head = self._head if self.is_last else None
        names = device_weights(self.config, gguf, spec.first, spec.last)
        group_of = {layer: spec.group_of[layer] for layer in range(spec.first, spec.last)}
        types = (spec.key_type, spec.value_type)
        pools = (group_of, spec.num_blocks, spec.num_states)
        start = (gguf, self.config, self.device)
        if not issubclass(kind, DeviceLayers):
            return kind(*start, names, self.is_first, head, *pools, types, progress)
        away = host_layers(self.config, spec.first, spec.last, spec.host_experts)
        elsewhere = {name for layer in away for name in host_tensors(self.config, layer)}
        names = [name for name in names if name not in elsewhere]
        layers = kind(*start, names, self.is_first, head, *pools, types, progress, away)
        if away:
            self._host_experts = HostExperts(
                gguf, self.config, away, spec.host_threads, spec.max_tokens, progress
            )
        return layers

    def _move(self, batch: BatchLike) -> None:
        """Spills, then copies, then loads: each may use the blocks that the ones before have freed."""
        self._mover.begin(batch.spills)
        self._layers.kv.copy_blocks(batch.copies)
        self._mover.load(batch.loads)

    def _kind(self) -> type[CpuLayers] | type[DeviceLayers]:
        if self.device.is_cpu:
            from backends.cpu.layers import CpuLayers  # compiles or loads the kernels

            return CpuLayers
        from backends.ggml.layers import DeviceLayers

        return DeviceLayers

    def _new_builder(self, rows: int, layout: Layout) -> GraphBuilder:
        return self._layers.new_builder(rows, layout)

    def _graph(self, rows: int, logits: int, layout: Layout, embeds: bool = False) -> _Graph:
        key = (rows, logits, layout.key, embeds)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        if len(self._graphs) >= MAX_GRAPHS:
            self._graphs.popitem(last=False)[1].close()
        size = self._lib.gallocr_get_buffer_size(self._allocator, 0)
        graph = self._build(self._new_builder(rows, layout), logits, embeds)
        if not self._lib.gallocr_alloc_graph(self._allocator, graph.builder.graph):
            raise DeviceError(f"device {self.device.info.name}: no memory for the compute buffer")
        if self._lib.gallocr_get_buffer_size(self._allocator, 0) != size:
            # The buffer has moved, and the graphs so far point into the old one. Rare: most tokens
            # without logits can need more than with them, where the vocabulary is small.
            self._free_graphs()
        self._graphs[key] = graph
        return graph

    def _free_graphs(self) -> None:
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()

    def _build(self, g: GraphBuilder, logits: int, embeds: bool) -> _Graph:
        if self.is_first:
            source, x = self._layers.embed(g)
        else:
            source = x = g.input_f32(self.config.n_embd, g.rows)
        looked_up = self._layer_inputs(g, x) if self.config.layer_input else {}
        keep = g.input_i32(logits) if logits else None
        for layer in range(self.spec.first, self.spec.last):
            x = build_block(g, layer, x, keep if layer == self.config.n_layer - 1 else None)
        best = None
        if logits:
            x = build_head(g, x, self._head)
            best = g.argmax(x)
        elif embeds:
            x = build_embeddings(g, x)
        g.finish([x] if best is None else [x, best])
        pieces = Pieces(g.graph, g.seams) if g.seams else None
        return _Graph(g, source, keep, x, best, looked_up, embeds, pieces)

    def _layer_inputs(self, g: GraphBuilder, x: int) -> dict[str, int]:
        """Make what each layer takes in. Returns the graph's inputs of rows that the host looks up."""
        c = self.config
        looked_up = {EMBEDDINGS: g.input_f32(c.n_layer * c.layer_input, g.rows)}
        if not self.is_first:
            looked_up[EMBEDDING] = g.input_f32(c.n_embd, g.rows)
            x = g.scaled(looked_up[EMBEDDING], c.embedding_scale)
        g.layer_inputs = build_layer_inputs(g, x, looked_up[EMBEDDINGS])
        return looked_up

    def _result(self, graph: _Graph, count: int) -> np.ndarray:
        """`count` rows of the graph's output: in place where nothing can overwrite them too early."""
        if not count:
            return np.empty((0, self.config.n_vocab if self.is_last else self.config.n_embd), np.float32)
        if self._outputs is None:
            if graph.view is None:
                pointer = ctypes.cast(self._lib.get_data(graph.output), ctypes.POINTER(ctypes.c_float))
                graph.view = np.ctypeslib.as_array(pointer, shape_of(graph.output)[1::-1])
            return graph.view[:count]
        outputs = self._outputs
        if graph.embeds:
            outputs = self._embeddings = self._embeddings or [
                np.empty((self.spec.max_tokens, self.config.n_embd), np.float32) for _ in outputs
            ]
        outputs.append(outputs.pop(0))
        out = outputs[-1][:count]
        self._get(graph.output, out)
        return out

    def _get(self, tensor: int, out: np.ndarray) -> None:
        self._lib.backend_tensor_get_async(self.device.backend, tensor, out.ctypes.data, 0, out.nbytes)

    def _set(self, tensor: int, values: np.ndarray) -> None:
        self._alive.append(values)
        self._lib.backend_tensor_set_async(self.device.backend, tensor, values.ctypes.data, 0, values.nbytes)


__all__ = ["GgmlStage", "StageError", "StageSpec", "bucket", "device_weights", "stage_weights"]
