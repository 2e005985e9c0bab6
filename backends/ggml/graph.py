"""Building one ggml graph: the operators a transformer block is made of.

`GraphBuilder` has them in plain ggml operators, which every device runs. A device with kernels of
its own subclasses it (backends.cpu.graph) and fuses what shares an input; models/block.py is written
once, against these methods.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence

import numpy as np

from backends.ggml.devices import Device
from backends.ggml.host_experts import Seam
from backends.ggml.lib import TYPE_F32, TYPE_I32, P, ggml, shape_of
from backends.ggml.models.config import ModelConfig
from backends.ggml.models.experts import build_expert_ffn, build_mixture
from backends.ggml.models.mixture import OAI_ALPHA, OAI_LIMIT
from backends.ggml.models.tensors import bias_of
from backends.ggml.weights import Weights

MAX_NODES, EXPERT_NODES = 80, 80  # per layer, generously; and where it has experts, beside 2 for each used


def padded(values: np.ndarray, count: int, kind: type = np.int32) -> np.ndarray:
    """[count]: the values, then zeros (token 0, position 0, slot 0 of the scratch block)."""
    out: np.ndarray = np.zeros(count, kind)
    out[: len(values)] = values
    return out


class GraphBuilder:
    """Metadata of one graph under construction. Tensors are handles; row length comes first.

    `rows` is the graph's number of token rows T, padding included.
    """

    def __init__(
        self, config: ModelConfig, device: Device, weights: Weights, rows: int, extra_nodes: int = 0
    ):
        self.lib, self.config, self.device, self.weights, self.rows = ggml(), config, device, weights, rows
        experts = EXPERT_NODES + 2 * config.mixture.used if config.mixture else 0
        nodes = (MAX_NODES + experts + extra_nodes) * (config.n_layer + 2)
        self.context = self.lib.context(2 * nodes, nodes)
        self.graph = self.lib.new_graph_custom(self.context, nodes, False)
        self.seams: list[Seam] = []  # where a step leaves the device
        self.layer_inputs = 0  # of models/layer_inputs.py, where the model has such

    def input(self, type_id: int, width: int, rows: int = 1) -> int:
        tensor = self.lib.new_tensor_4d(self.context, type_id, width, rows, 1, 1)
        self.lib.set_input(tensor)
        return tensor

    def input_i32(self, count: int) -> int:
        return self.input(TYPE_I32, count)

    def input_f32(self, width: int, rows: int) -> int:
        return self.input(TYPE_F32, width, rows)

    def embed(self, ids: int, name: str, scale: float) -> int:
        """Rows of the embedding matrix, times `scale`."""
        return self.scaled(self.lib.get_rows(self.context, self.weights.tensor(name), ids), scale)

    def scaled(self, x: int, scale: float) -> int:
        return x if scale == 1.0 else self.lib.scale(self.context, x, scale)

    def scaled_by(self, x: int, weight: str) -> int:
        """x times a weight that is one number."""
        return self.lib.mul(self.context, x, self.weights.tensor(weight))

    def select(self, x: int, rows: int) -> int:
        """The rows of x that the int32 tensor names."""
        return self.lib.get_rows(self.context, x, rows)

    def soft_capped(self, x: int, cap: float) -> int:
        """cap * tanh(x / cap); x as it is for a cap of 0."""
        if not cap:
            return x
        return self.scaled(self.lib.tanh(self.context, self.scaled(x, 1.0 / cap)), cap)

    def norm(self, x: int, weight: str) -> int:
        """The family's norm of each row, times the weight, plus its bias if there is one."""
        normalize = self.lib.rms_norm if self.config.family.norm == "rms" else self.lib.norm
        normed = normalize(self.context, x, self.config.norm_eps)
        return self._biased(self.lib.mul(self.context, normed, self.weights.tensor(weight)), weight)

    def _biased(self, y: int, weight: str) -> int:
        bias = bias_of(weight)
        return self.add(y, self.weights.tensor(bias)) if bias in self.weights else y

    def add(self, a: int, b: int) -> int:
        return self.lib.add(self.context, a, b)

    def linear(self, x: int, weight: str, residual: int | None = None) -> int:
        """x times the transposed weight [n_in, n_out], plus its bias and the residual if there are such."""
        y = self._biased(self.lib.mul_mat(self.context, self.weights.tensor(weight), x), weight)
        return y if residual is None else self.add(y, residual)

    def norm_linear(self, x: int, norm: str | None, weights: Sequence[str], apart: bool = False) -> list[int]:
        """Several projections of one input, normed if `norm` is a weight: one tensor each, or side by side
        in one unless they are to be `apart`."""
        normed = x if norm is None else self.norm(x, norm)
        return [self.linear(normed, w) for w in weights]

    def feed_forward(
        self, x: int, norm: str | None, inputs: Sequence[str], down: str, residual: int | None
    ) -> int:
        """down(what `activate` makes of the inputs' products with x, which is normed before if `norm` is a
        weight), plus the residual if there is one. `inputs`: gate and up, both in one, or up alone."""
        return self.linear(self.activate(*self.norm_linear(x, norm, inputs)), down, residual)

    def activate(self, *inputs: int) -> int:
        """activation(gate) * up, of two tensors or side by side in one; without a gate, activation(up)."""
        lib, silu = self.lib, self.config.family.activation == "silu"
        if self.config.family.activation == "oai":
            return lib.swiglu_oai(self.context, *inputs, OAI_ALPHA, OAI_LIMIT)
        if len(inputs) == 2:
            return (lib.swiglu_split if silu else lib.geglu_split)(self.context, *inputs)
        if self.config.family.ffn == "plain":
            return (lib.silu if silu else lib.gelu)(self.context, *inputs)
        return (lib.swiglu if silu else lib.geglu)(self.context, *inputs)

    def expert_ffn(self, layer: int, x: int) -> int:
        """x plus the feed-forward of the layer's experts, as models/experts.py has it."""
        return build_expert_ffn(self, layer, x)

    def mixture(self, layer: int, x: int, residual: bool = True) -> int:
        """x (if `residual`) plus what those of the layer's experts that each token chooses make of it."""
        return build_mixture(self, layer, x, residual)

    def expert_linear(self, x: int, weight: str, ids: int) -> int:
        """x [n_in, 1 or used, T] times the weights of those experts that each token's ids, int32 [used, T],
        name, plus their biases if there are such: [n_out, used, T]."""
        y = self.lib.mul_mat_id(self.context, self.weights.tensor(weight), x, ids)
        bias = bias_of(weight)
        return self.lib.add_id(self.context, y, self.weights.tensor(bias), ids) if bias in self.weights else y

    def attention(self, layer: int, projections: Sequence[int]) -> int:
        """Norm and rotate q and k, store k and v, attend. Returns [n_head * head_dim_v, T].

        `projections` is what `norm_linear` returned for q, k and v, or for all in one matrix.
        """
        raise NotImplementedError  # backends.cpu.graph and paged_graph have one each

    def gated_attention(self, layer: int, projections: Sequence[int]) -> int:
        """`attention` where a gate is behind each head's query: the output is multiplied with its sigmoid.

        Its value heads are as wide as its query heads.
        """
        lib, ctx, c = self.lib, self.context, self.config
        query, *others = projections
        dim, heads, rows = c.head_dim_k, c.n_head, self.rows_of(query)
        strides = (8 * dim, 8 * dim * heads, 8 * dim * heads * rows)
        q, gate = (
            lib.reshape_2d(ctx, lib.cont(ctx, half), heads * dim, rows)
            for half in (lib.view_4d(ctx, query, dim, heads, rows, 1, *strides, at) for at in (0, 4 * dim))
        )
        return lib.mul(ctx, self.attention(layer, [q, *others]), lib.sigmoid(ctx, gate))

    def recurrent(self, layer: int, x: int, norm: str | None) -> int:
        """What a recurrent layer makes of x, which is normed before if `norm` is a weight, and of the states
        that its sequences have: [width of the output matrix' rows, T]. See models/delta_net.py."""
        raise NotImplementedError  # backends.cpu.graph and paged_graph have one each

    def argmax(self, logits: int) -> int | None:
        """int32 [L] (see base.StageBackend.argmax), None where the device has no kernel for it."""
        return None

    def custom(
        self, width: int, rows: int, sources: Sequence[int], function: int, parameters: np.ndarray
    ) -> int:
        """A numba operator as a node that all threads run; `parameters` must outlive the graph."""
        array = (P * len(sources))(*sources)
        address = C.c_void_p(function)
        return self.lib.custom_4d(
            self.context,
            TYPE_F32,
            width,
            rows,
            1,
            1,
            array,
            len(sources),
            address,
            -1,
            parameters.ctypes.data,
        )

    def finish(self, outputs: Sequence[int]) -> None:
        for tensor in outputs:
            self.lib.set_output(tensor)
            self.lib.build_forward_expand(self.graph, tensor)

    def rows_of(self, tensor: int) -> int:
        return shape_of(tensor)[1]
