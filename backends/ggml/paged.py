"""KV pools on a device that has plain ggml operators only.

Each layer's K and V are one F32 tensor of raw bits, a row for each block:

    row b of K      token 16 b: [kv head][dim] | token 16 b + 1: ... | token 16 b + 15: ...

so that `get_rows` copies whole blocks bit by bit, whatever type they really have: f16, or q8_0 (a head's
dim / 32 blocks of 34 bytes: f16 scale, 32 codes). Writing goes through a view of that type with a row for
each token. V has the same form. Checked on the CPU and on Vulkan.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Iterable, Sequence

from backends.base import BlockCopyLike
from backends.ggml.attention_layout import BLOCK_SIZE, SPAN
from backends.ggml.devices import Device
from backends.ggml.lib import (
    TYPE_F16,
    TYPE_F32,
    TYPE_Q8_0,
    WORD_DATA,
    WORD_NB,
    WORD_NE,
    WORD_VIEW_OFFSET,
    ggml,
    shape_of,
)
from backends.ggml.models.config import ModelConfig
from backends.ggml.weights import DeviceTensors
from backends.kv_format import kv_homes
from quant.types import GGML_TYPES, row_bytes

KINDS = {"f16": TYPE_F16, "q8_0": TYPE_Q8_0}  # formats of kv_format.KV_TYPES that ggml's operators know
PADDING = SPAN // BLOCK_SIZE  # blocks behind the last one, so that a view's span may reach beyond it


class PagedPools:
    """Pools of the stage's layers: `keys[layer]` and `values[layer]` are F32 [block bytes / 4, blocks], for
    `layers`, those that have pools of their own; any layer's are those of `home_of[layer]`.

    What they really are, `key_type` and `value_type` say: `kv_types` as ggml types, of KINDS.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        layers: Sequence[int],
        group_of: dict[int, int],
        num_blocks: Sequence[int],
        kv_types: tuple[str, str],
    ):
        self.home_of = kv_homes(config, layers)
        self.layers, self.group_of = sorted(set(self.home_of.values())), group_of
        self.key_type, self.value_type = (KINDS[kind] for kind in kv_types)
        self._token_bytes = {}  # of keys and of values
        for layer in self.layers:
            heads = config.heads_of(layer)
            sizes = row_bytes(self.key_type, heads.dim_k), row_bytes(self.value_type, heads.dim_v)
            self._token_bytes[layer] = [heads.n * size for size in sizes]
        shapes = [
            (TYPE_F32, BLOCK_SIZE * nbytes // 4, num_blocks[group_of[layer]] + PADDING)
            for layer in self.layers
            for nbytes in self._token_bytes[layer]
        ]
        self._tensors = DeviceTensors(device, shapes)
        self._tensors.clear()  # what is masked is still multiplied, by zero: it must be finite
        self.keys = dict(zip(self.layers, self._tensors.handles[::2], strict=True))
        self.values = dict(zip(self.layers, self._tensors.handles[1::2], strict=True))
        self._context = ggml().context(2 * len(shapes))
        self._rows = {  # two views of one block, for copies
            pool: tuple(row_view(self._context, pool) for _ in range(2)) for pool in self._tensors.handles
        }

    def token_bytes(self, layer: int) -> Sequence[int]:
        """Of a token's keys and of its values in a layer."""
        return self._token_bytes[layer]

    @property
    def nbytes(self) -> int:
        return self._tensors.nbytes

    def copy_blocks(self, copies: Iterable[BlockCopyLike]) -> None:
        """Carry out copy-on-write in every layer of the copies' groups, without leaving the device."""
        lib = ggml()
        for copy in copies:
            for layer in self.layers:
                if self.group_of[layer] != copy.group:
                    continue
                for pool in (self.keys[layer], self.values[layer]):
                    source, target = self._rows[pool]
                    move_view(source, pool, copy.src)
                    move_view(target, pool, copy.dst)
                    lib.backend_tensor_copy(source, target)

    def parts(self, group: int) -> list[tuple[int, int]]:
        """(tensor, bytes of a block) of the group's pools: keys and values by layer. See moves.Pools."""
        return [
            (pool, 4 * shape_of(pool)[0])
            for layer in self.layers
            if self.group_of[layer] == group
            for pool in (self.keys[layer], self.values[layer])
        ]

    def close(self) -> None:
        ggml().free(self._context)
        self._tensors.close()


def row_view(context: int, pool: int) -> int:
    """One block of a pool as a tensor; `move_view` points it at another."""
    lib = ggml()
    width = shape_of(pool)[0]
    view = lib.view_4d(context, pool, width, 1, 1, 1, 4 * width, 4 * width, 4 * width, 0)
    lib.backend_view_init(view)
    return view


def move_view(view: int, pool: int, block: int) -> None:
    """Let a view of a pool begin at a block. The graph that it is part of need not be built again."""
    offset = block * 4 * shape_of(pool)[0]
    C.c_int64.from_address(view + 8 * WORD_VIEW_OFFSET).value = offset
    C.c_int64.from_address(view + 8 * WORD_DATA).value = ggml().get_data(pool) + offset


def reinterpret(context: int, tensor: int, type_id: int, shape: Sequence[int], strides: Sequence[int]) -> int:
    """The bytes of a tensor seen as another type: `shape` in elements, `strides` in bytes, both [4].

    ggml has views but no views of another type; the fields are written as ggml lays them out.
    """
    lib = ggml()
    view = lib.view_4d(context, tensor, 1, 1, 1, 1, 4, 4, 4, 0)
    C.c_int32.from_address(view).value = type_id
    for i in range(4):
        C.c_int64.from_address(view + 8 * (WORD_NE + i)).value = shape[i]
        C.c_int64.from_address(view + 8 * (WORD_NB + i)).value = strides[i]
    return view


def token_rows(context: int, pool: int, type_id: int, token_bytes: int) -> int:
    """A pool as [heads x dim, slots] of its type: where `set_rows` writes tokens."""
    slots = shape_of(pool)[1] * BLOCK_SIZE
    kind, size = GGML_TYPES[type_id], slots * token_bytes
    width = token_bytes // kind.nbytes * kind.elements
    return reinterpret(context, pool, type_id, (width, slots, 1, 1), (kind.nbytes, token_bytes, size, size))


def block_rows(context: int, pool: int, stored: int, type_id: int) -> int:
    """A pool as [16 tokens x heads x dim, blocks] of a type: what `get_rows` gathers, and then unpacks.

    `stored` is another view of its bytes, and read through: that of what was just written, for the order.
    """
    width, blocks = 4 * shape_of(pool)[0], shape_of(pool)[1]
    kind, size = GGML_TYPES[type_id], width * blocks
    shape = (width // kind.nbytes * kind.elements, blocks, 1, 1)
    return reinterpret(context, stored, type_id, shape, (kind.nbytes, width, size, size))


def heads_of_tokens(
    context: int,
    tensor: int,
    type_id: int,
    heads: int,
    dim: int,
    span: int,
    sequences: int,
    flipped: bool = False,
) -> int:
    """[dim, span, heads, sequences] of rows that lie as [sequences][span][heads][dim]; or `flipped`,
    [span, dim, heads, sequences], of a type that has no blocks.
    """
    head = row_bytes(type_id, dim)
    shape, strides = (dim, span), (GGML_TYPES[type_id].nbytes, heads * head)
    if flipped:
        shape, strides = shape[::-1], strides[::-1]
    return reinterpret(
        context, tensor, type_id, (*shape, heads, sequences), (*strides, head, span * heads * head)
    )


__all__ = [
    "KINDS",
    "PADDING",
    "PagedPools",
    "block_rows",
    "heads_of_tokens",
    "move_view",
    "reinterpret",
    "row_view",
    "token_rows",
]
