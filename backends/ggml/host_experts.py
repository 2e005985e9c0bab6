"""Steps that leave their device: experts that main memory holds are multiplied by the CPU.

    device   layers up to the mixture of layer i     -> x [n_embd, T], to the CPU
    CPU      what layer i's experts make of norm(x)  -> [n_embd, T], to the device
    device   x plus that, then on to the next seam

For ggml's allocator all of the device's is one graph, so that what crosses a seam keeps its memory; `Pieces`
are its parts between the seams. What the CPU sends has one place for all layers: one is done with before the
next comes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from backends.ggml.devices import Device, DeviceError, open_device
from backends.ggml.lib import STATUS_SUCCESS, ggml, shape_of
from backends.ggml.models.config import ModelConfig
from backends.ggml.models.tensors import mixture_tensors
from backends.ggml.weights import Progress
from quant.gguf import GGUFFile

if TYPE_CHECKING:
    from backends.cpu.graph import CpuGraphBuilder


class Seam(NamedTuple):
    """Before node `node` of a graph the CPU takes `source` [n_embd, rows] through the experts of `layer`, to
    `target`, of the same shape. `kept`: its rows are those whose logits are wanted, not all of the step."""

    node: int
    layer: int
    source: int
    target: int
    kept: bool


class Pieces:
    """The parts of a graph between its seams, in their order."""

    def __init__(self, graph: int, seams: Sequence[Seam]):
        lib = self._lib = ggml()
        self.seams = tuple(seams)
        self.graphs: list[int] = []
        self._contexts: list[int] = []
        start = 0
        for end in (*(seam.node for seam in seams), lib.graph_n_nodes(graph)):
            size = max(1, end - start)
            self._contexts.append(lib.context(1, size))
            piece = lib.new_graph_custom(self._contexts[-1], size, False)
            for node in range(start, end):
                lib.graph_add_node(piece, lib.graph_node(graph, node))
            self.graphs.append(piece)
            start = end

    def close(self) -> None:
        for context in self._contexts:
            self._lib.free(context)
        self._contexts.clear()


def host_layers(config: ModelConfig, first: int, last: int, count: int) -> tuple[int, ...]:
    """Those of layers [first, last) whose experts are in main memory when `count` layers' are: the first."""
    having = [layer for layer in range(config.n_layer) if config.has_experts(layer)]
    return tuple(layer for layer in having[:count] if first <= layer < last)


def host_tensors(config: ModelConfig, layer: int) -> list[str]:
    """Names of what only the CPU needs of such a layer. The norm is there on both sides."""
    return [name for name in mixture_tensors(config, layer) if not name.endswith("_norm.weight")]


class HostExperts:
    """The experts of some layers on this machine's CPU. One thread at a time may use it.

    Graphs are kept by layer and number of rows; all compute in one buffer.
    """

    def __init__(
        self,
        gguf: GGUFFile,
        config: ModelConfig,
        layers: Iterable[int],
        threads: int,
        max_rows: int,
        progress: Progress | None = None,
    ):
        """`threads`: 0 for one per core. Raises DeviceError for lack of memory."""
        from backends.cpu.layers import CpuLayers  # compiles or loads the kernels

        self._lib, self._width, layers = ggml(), config.n_embd, tuple(layers)
        self._device = open_device("CPU", threads)
        names = [name for layer in layers for name in mixture_tensors(config, layer)]
        self._layers = CpuLayers(
            gguf,
            config,
            self._device,
            names,
            lookup=False,
            head=None,
            group_of={},
            num_blocks=(),
            num_states=0,
            kv_types=("f16", "f16"),
            progress=progress,
        )
        self._allocator = self._lib.gallocr_new(self._device.buffer_type)
        self._graphs: dict[tuple[int, int], tuple[CpuGraphBuilder, int, int]] = {}
        for layer in layers:  # the largest graphs first: their buffer then serves all others
            self._graph(layer, max(max_rows, self._layers.min_rows))

    @property
    def nbytes(self) -> int:
        """Bytes of weights, and of the buffer."""
        return self._layers.weight_bytes + self._lib.gallocr_get_buffer_size(self._allocator, 0)

    def run(self, device: Device, seam: Seam, count: int) -> None:
        """Take the first `count` rows of the seam's source on `device` through the experts, to its target."""
        lib, rows = self._lib, shape_of(seam.source)[1]
        g, source, result = self._graph(seam.layer, max(rows, self._layers.min_rows))
        row = 4 * self._width
        lib.backend_tensor_get_async(device.backend, seam.source, lib.get_data(source), 0, row * rows)
        lib.backend_synchronize(device.backend)
        self._layers.kv.header.set_rows(count)
        if lib.backend_graph_compute(self._device.backend, g.graph) != STATUS_SUCCESS:
            raise DeviceError("device CPU: the experts in main memory could not be computed")
        out = lib.get_data(result)
        ctypes.memset(out + row * count, 0, row * (rows - count))  # padding, which must be finite
        lib.backend_tensor_set_async(device.backend, seam.target, out, 0, row * rows)

    def close(self) -> None:
        self._free_graphs()
        self._lib.gallocr_free(self._allocator)
        self._layers.close()
        self._device.close()

    def check_invariants(self) -> None:
        for (layer, rows), (g, source, result) in self._graphs.items():
            assert shape_of(source) == shape_of(result) == (self._width, rows, 1, 1), layer
            assert g.rows == rows and self._lib.get_data(result)

    def _graph(self, layer: int, rows: int) -> tuple[CpuGraphBuilder, int, int]:
        """(graph, its input, its output), made on first use."""
        from backends.cpu.layers import NO_LAYOUT

        key = (layer, rows)
        if key not in self._graphs:
            size = self._lib.gallocr_get_buffer_size(self._allocator, 0)
            g = self._layers.new_builder(rows, NO_LAYOUT)
            source = g.input_f32(self._width, rows)
            result = g.mixture(layer, source, residual=False)
            g.finish([result])
            if not self._lib.gallocr_alloc_graph(self._allocator, g.graph):
                raise DeviceError("device CPU: no memory for the compute buffer of experts")
            if self._lib.gallocr_get_buffer_size(self._allocator, 0) != size:
                self._free_graphs()  # they point into the buffer that was
            self._graphs[key] = g, source, result
        return self._graphs[key]

    def _free_graphs(self) -> None:
        for g, _, _ in self._graphs.values():
            self._lib.free(g.context)
        self._graphs.clear()


__all__ = ["HostExperts", "Pieces", "Seam", "host_layers", "host_tensors"]
