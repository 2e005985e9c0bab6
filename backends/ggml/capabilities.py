"""What one device can compute, asked of the device itself: no answer is carried over to another.

ggml answers `ggml_backend_dev_supports_op` for an operator whose tensors may lie in a buffer or in none.
The weights are put in an empty buffer of the device for the question: some devices refuse an operator
whose weights are elsewhere. A ggml RPC device answers yes to everything, whatever stands behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from backends.ggml.devices import Device
from backends.ggml.lib import TYPE_F16, TYPE_F32, TYPE_I32, TYPE_I64, Library, ggml, set_buffer
from backends.ggml.models.delta_net import DeltaNet

# Whole blocks of every weight type, and what the kernels of all devices take in one go
COLUMNS, ROWS, TOKENS = 512, 64, 4
CACHED = 256  # a multiple of every kernel's step over the context

MAX_TENSORS = 32
AskFor = Callable[[Library, int], tuple[int, tuple[int, ...]]]


def can_multiply(device: Device, type_id: int) -> bool:
    """Whether weights of ggml type `type_id` can be multiplied with float32 activations, by one row and by
    several."""

    def multiply(tokens: int, lib: Library, ctx: int) -> tuple[int, tuple[int, ...]]:
        weight = lib.new_tensor_4d(ctx, type_id, COLUMNS, ROWS, 1, 1)
        return lib.mul_mat(ctx, weight, lib.new_tensor_4d(ctx, TYPE_F32, COLUMNS, tokens, 1, 1)), (weight,)

    return all(_supported(device, partial(multiply, tokens)) for tokens in (1, TOKENS))


def can_multiply_experts(device: Device, type_id: int) -> bool:
    """The same for the weights of several experts, of which each token names two."""

    def multiply(tokens: int, lib: Library, ctx: int) -> tuple[int, tuple[int, ...]]:
        weight = lib.new_tensor_4d(ctx, type_id, COLUMNS, ROWS, 4, 1)
        x = lib.new_tensor_4d(ctx, TYPE_F32, COLUMNS, 1, tokens, 1)
        return lib.mul_mat_id(ctx, weight, x, lib.new_tensor_4d(ctx, TYPE_I32, 2, tokens, 1, 1)), (weight,)

    return all(_supported(device, partial(multiply, tokens)) for tokens in (1, TOKENS))


def can_look_up(device: Device, type_id: int) -> bool:
    """Whether rows of a table of ggml type `type_id` can be gathered as float32 (token embeddings)."""

    def rows(lib: Library, ctx: int) -> tuple[int, tuple[int, ...]]:
        table = lib.new_tensor_4d(ctx, type_id, COLUMNS, ROWS, 1, 1)
        return lib.get_rows(ctx, table, lib.new_tensor_4d(ctx, TYPE_I32, TOKENS, 1, 1, 1)), (table,)

    return _supported(device, rows)


def can_store(device: Device, type_id: int) -> bool:
    """Whether float32 rows can be written as ggml type `type_id` at the slots that an int64 tensor names."""

    def store(lib: Library, ctx: int) -> tuple[int, tuple[int, ...]]:
        pool = lib.new_tensor_4d(ctx, type_id, COLUMNS, ROWS, 1, 1)
        values = lib.new_tensor_4d(ctx, TYPE_F32, COLUMNS, TOKENS, 1, 1)
        slots = lib.new_tensor_4d(ctx, TYPE_I64, TOKENS, 1, 1, 1)
        return lib.set_rows(ctx, pool, values, slots), (pool,)

    return _supported(device, store)


def can_flash_attend(
    device: Device,
    head_dim_k: int,
    head_dim_v: int,
    n_head: int,
    n_head_kv: int,
    key_type: int = TYPE_F16,
    value_type: int = TYPE_F16,
    soft_cap: float = 0.0,
    sinks: bool = False,
) -> bool:
    """Whether ggml's fused attention runs with K and V of these ggml types and a float16 mask, for one
    query of each sequence and for several (queries float32 [head_dim_k, T, n_head, S])."""

    def attend(tokens: int, lib: Library, ctx: int) -> tuple[int, tuple[int, ...]]:
        sequences = 2
        q = lib.new_tensor_4d(ctx, TYPE_F32, head_dim_k, tokens, n_head, sequences)
        k = lib.new_tensor_4d(ctx, key_type, head_dim_k, CACHED, n_head_kv, sequences)
        v = lib.new_tensor_4d(ctx, value_type, head_dim_v, CACHED, n_head_kv, sequences)
        mask = lib.new_tensor_4d(ctx, TYPE_F16, CACHED, tokens, 1, sequences)
        attended = lib.flash_attn_ext(ctx, q, k, v, mask, head_dim_k**-0.5, 0.0, soft_cap)
        if not sinks:
            return attended, (k, v)
        sink = lib.new_tensor_4d(ctx, TYPE_F32, n_head, 1, 1, 1)
        lib.flash_attn_ext_add_sinks(attended, sink)
        return attended, (k, v, sink)

    return all(_supported(device, partial(attend, tokens)) for tokens in (1, TOKENS))


def unsupported(device: Device, graph: int) -> str | None:
    """The first operator of an allocated graph that the device lacks: ggml would end the process over it."""
    lib = ggml()
    for index in range(lib.graph_n_nodes(graph)):
        node = lib.graph_node(graph, index)
        if not lib.backend_dev_supports_op(device.handle, node):
            return lib.op_desc(node).decode()
    return None


def can_advance_states(device: Device, sizes: DeltaNet) -> bool:
    """Whether such gated delta nets can be computed, for one token of each sequence and for several."""
    channels, heads = sizes.conv_width, sizes.value_heads

    def convolve(tokens: int, lib: Library, ctx: int) -> tuple[int, tuple[int, ...]]:
        inputs = lib.new_tensor_4d(ctx, TYPE_F32, sizes.taps - 1 + tokens, channels, 2, 1)
        taps = lib.new_tensor_4d(ctx, TYPE_F32, sizes.taps, channels, 1, 1)
        return lib.ssm_conv(ctx, inputs, taps), (taps,)

    def advance(tokens: int, lib: Library, ctx: int) -> tuple[int, tuple[int, ...]]:
        def rows(width: int, count: int) -> int:
            return lib.new_tensor_4d(ctx, TYPE_F32, width, count, tokens, 2)

        q, k, v = (rows(sizes.dim, count) for count in (sizes.key_heads, sizes.key_heads, heads))
        state = lib.new_tensor_4d(ctx, TYPE_F32, sizes.dim, sizes.dim, heads, 2)
        return lib.gated_delta_net(ctx, q, k, v, rows(1, heads), rows(1, heads), state, 1), ()

    asked = (partial(ask, tokens) for ask in (convolve, advance) for tokens in (1, TOKENS))
    return all(_supported(device, ask) for ask in asked)


def _supported(device: Device, ask: AskFor) -> bool:
    """The device's answer for the operator that `ask` builds; also returns the tensors it keeps."""
    lib = ggml()
    with _empty_buffer(device) as buffer:
        context = lib.context(MAX_TENSORS)
        try:
            operator, kept = ask(lib, context)
            for tensor in kept:
                set_buffer(tensor, buffer)
            return bool(lib.backend_dev_supports_op(device.handle, operator))
        finally:
            lib.free(context)


@contextmanager
def _empty_buffer(device: Device) -> Iterator[int]:
    lib = ggml()
    buffer = lib.backend_buft_alloc_buffer(device.buffer_type, 0)
    try:
        yield buffer
    finally:
        lib.backend_buffer_free(buffer)
