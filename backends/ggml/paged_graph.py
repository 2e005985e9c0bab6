"""The graph builder of a device without kernels of our own: paged attention in plain ggml operators.

A part (see attention_layout) either gathers its blocks or, alone and in one piece, is read in place:

    pool <- set_rows(k)          all rows of the step, at their slots
    K, V <- get_rows(pool)       [dim, span, kv head, sequence] as they are (or a view of the pool)
    flash_attn(q, K, V, mask)    or, where the device has none, softmax(q K^T + mask) V

Where these do not take the pool's formats, the same get_rows unpacks what it gathers to f32 on its way,
which is made f16 for flash_attn.

Everything that differs from step to step with one shape is an input; views are moved.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import numpy as np

from backends.base import BatchLike, KVHeads
from backends.ggml import attention_layout as layouts
from backends.ggml.attention_layout import BLOCK_SIZE, Layout, Part
from backends.ggml.devices import Device
from backends.ggml.graph import GraphBuilder, padded
from backends.ggml.host_experts import Seam
from backends.ggml.lib import TYPE_F16, TYPE_F32, TYPE_I32, TYPE_I64
from backends.ggml.models.config import ModelConfig
from backends.ggml.models.rope import Yarn
from backends.ggml.models.tensors import has_head_norms
from backends.ggml.paged import PagedPools, block_rows, heads_of_tokens, move_view, token_rows
from backends.ggml.recurrent_graph import NODES, StateInputs, StatePools, build_recurrent
from backends.ggml.weights import Weights

ROPE_NEOX = 2
PRECISION_F32 = 10
NO_YARN = Yarn(0, 32.0, 1.0)  # of no effect

Upload = Callable[[int, np.ndarray], None]  # (tensor, values): values live until the step is done


@dataclass(slots=True)
class _PartInputs:
    part: Part
    masks: dict[int, int] = field(default_factory=dict)  # by KV group
    blocks: dict[int, int] = field(default_factory=dict)  # where gathered
    views: list[tuple[int, int, int]] = field(default_factory=list)  # (view, pool, group) where in place


class PagedGraphBuilder(GraphBuilder):
    """`layout` is any layout of the graph's shape; `flash` says whether the device has that operator,
    `unpacks` whether keys and values are unpacked before they are attended. The experts of `host_layers` are
    elsewhere: at `seams` the graph is to be left for them.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        weights: Weights,
        rows: int,
        pools: PagedPools,
        layout: Layout,
        flash: bool,
        unpacks: bool,
        host_layers: Container[int] = (),
        states: StatePools | None = None,
    ):
        waves = () if layout.states is None else layout.states.waves
        nodes = 32 * len(layout.parts) + NODES * sum(map(len, waves))
        super().__init__(config, device, weights, rows, extra_nodes=nodes)
        self._host_layers, self._from_host = host_layers, 0
        self._selected = False
        self.pools, self.flash, self.unpacks = pools, flash, unpacks
        self._windows = {g: config.layer_windows[layer] for layer, g in pools.group_of.items()}
        self._groups = sorted(set(pools.group_of.values()))
        rotates = any(config.rope_of(layer) is not None for layer in pools.home_of)
        self._positions = self.input_i32(rows) if rotates else None  # an unused input has no memory
        self._growth: int | None = None
        if config.query_growth is not None:
            self._growth = self.lib.new_tensor_4d(self.context, TYPE_F32, 1, 1, rows, 1)
            self.lib.set_input(self._growth)
        written = {pools.group_of[layer] for layer in pools.layers if not config.shares_kv(layer)}
        self._slots = {g: self.input(TYPE_I64, rows) for g in sorted(written)}
        count = sum(p.sequences * p.rows for p in layout.parts)
        self._order = None if layout.order is None else self.input_i32(count)
        self._place = None if layout.place is None else self.input_i32(rows)
        self._stored: dict[int, Sequence[int]] = {}  # by layer: its pools, after the step's rows were written
        self._parts = [self._part_inputs(part) for part in layout.parts]
        self._states: StateInputs | None = None
        if states is not None and layout.states is not None:
            self._states = StateInputs(self, states, layout.states)

    def recurrent(self, layer: int, x: int, norm: str | None) -> int:
        assert self._states is not None
        return build_recurrent(self, self._states, layer, x, norm)

    def select(self, x: int, rows: int) -> int:
        self._selected = True
        return super().select(x, rows)

    def mixture(self, layer: int, x: int, residual: bool = True) -> int:
        if layer not in self._host_layers:
            return super().mixture(layer, x, residual)
        lib, ctx, width, rows = self.lib, self.context, self.config.n_embd, self.rows_of(x)
        if not self._from_host:
            self._from_host = self.input_f32(width, self.rows)
        lib.build_forward_expand(self.graph, x)
        row = 4 * width
        target = lib.view_4d(ctx, self._from_host, width, rows, 1, 1, row, row * rows, row * rows, 0)
        self.seams.append(Seam(lib.graph_n_nodes(self.graph), layer, x, target, self._selected))
        return self.add(target, x) if residual else target

    def set_step(self, batch: BatchLike, layout: Layout, upload: Upload) -> None:
        """Fill the inputs with a step of this shape and point the views at its blocks."""
        if self._positions is not None:
            upload(self._positions, padded(batch.positions, self.rows, np.int32))
        if self._growth is not None and self.config.query_growth is not None:
            factors = self.config.query_growth.factors(batch.positions)
            upload(self._growth, padded(factors, self.rows, np.float32))
        for g, slots in self._slots.items():
            upload(slots, padded(batch.slot_mapping[g], self.rows, np.int64))
        if self._order is not None and self._place is not None:
            assert layout.order is not None and layout.place is not None
            upload(self._order, layout.order)
            upload(self._place, layout.place)
        if self._states is not None and layout.states is not None:
            self._states.set_step(layout.states, upload)
        for inputs, member in zip(self._parts, layout.members, strict=True):
            for g, tensor in inputs.masks.items():
                upload(tensor, layouts.mask(inputs.part, member, batch, g, self._windows[g]))
            for g, tensor in inputs.blocks.items():
                upload(tensor, layouts.block_indices(inputs.part, member, batch.block_tables[g], g))
            for view, pool, g in inputs.views:
                first = batch.block_tables[g][member.indices[0], member.begins[g][0]]
                move_view(view, pool, int(first))

    def attention(self, layer: int, projections: Sequence[int]) -> int:
        c, lib, ctx = self.config, self.lib, self.context
        heads = c.heads_of(layer)
        q, *rest = projections if len(projections) != 1 else self._split(layer, projections[0], heads)
        q = self._rotate(layer, q, "attn_q_norm", c.n_head)
        if self._growth is not None:
            q = lib.mul(ctx, q, self._growth)
        home = self.pools.home_of[layer]
        pools = (self.pools.keys[home], self.pools.values[home])
        if rest:
            self._stored[home] = self._store_both(layer, pools, *rest)
        stored = self._stored.get(home, pools)  # of a layer that others share: not if it is elsewhere
        q = lib.reshape_2d(ctx, q, c.n_head * heads.dim_k, self.rows)
        if self._order is not None:
            q = lib.get_rows(ctx, q, self._order)
        result, at = None, 0
        for inputs in self._parts:
            attended = self._attend(inputs, layer, q, at, stored, pools)
            result = attended if result is None else lib.concat(ctx, result, attended, 1)
            at += inputs.part.sequences * inputs.part.rows
        assert result is not None
        return result if self._place is None else lib.get_rows(ctx, result, self._place)

    def _store_both(self, layer: int, pools: Sequence[int], k: int, v: int) -> Sequence[int]:
        """The pools after keys and values of the step's rows were written."""
        c, lib, ctx, p = self.config, self.lib, self.context, self.pools
        heads = c.heads_of(layer)
        k = self._rotate(layer, k, "attn_k_norm", heads.n)
        if c.family.value_norm:
            v = lib.rms_norm(ctx, lib.reshape_3d(ctx, v, heads.dim_v, heads.n, self.rows), c.norm_eps)
            v = lib.reshape_2d(ctx, v, heads.n * heads.dim_v, self.rows)
        k = lib.reshape_2d(ctx, k, heads.n * heads.dim_k, self.rows)
        kinds = (p.key_type, p.value_type)
        return [
            self._store(pool, kind, size, x, p.group_of[layer])
            for pool, kind, size, x in zip(pools, kinds, p.token_bytes(layer), (k, v), strict=True)
        ]

    def _split(self, layer: int, qkv: int, heads: KVHeads) -> list[int]:
        """Query, key and value rows that lie side by side; the query alone where a layer has no others."""
        if self.config.shares_kv(layer):
            return [qkv]
        parts, at = [], 0
        counts = (self.config.n_head, heads.n, heads.n)
        widths = [n * dim for n, dim in zip(counts, (heads.dim_k, *heads[1:]), strict=True)]
        row = 4 * sum(widths)
        for width in widths:
            view = self.lib.view_4d(self.context, qkv, width, self.rows, 1, 1, row, row, row, at)
            parts.append(self.lib.cont(self.context, view))
            at += 4 * width
        return parts

    def _rotate(self, layer: int, x: int, norm: str, heads: int) -> int:
        """[dim, heads, T], normed where the family does, rotated by the rows' positions."""
        lib, ctx, c, rope = self.lib, self.context, self.config, self.config.rope_of(layer)
        x = lib.reshape_3d(ctx, x, c.heads_of(layer).dim_k, heads, self.rows)
        if has_head_norms(c, layer):
            x = self.norm(x, f"blk.{layer}.{norm}.weight")
        if rope is None:
            return x
        factors = None if rope.factors is None else self.weights.tensor(rope.factors)
        mode = ROPE_NEOX if rope.neox else 0
        yarn = rope.yarn or NO_YARN
        return lib.rope_ext(
            ctx,
            x,
            self._positions,
            factors,
            rope.n_rot,
            mode,
            yarn.original_context,
            rope.base,
            rope.scale,
            float(rope.yarn is not None),
            rope.ggml_magnitude,
            yarn.fast,
            yarn.slow,
        )

    def _store(self, pool: int, type_id: int, token_bytes: int, rows: int, group: int) -> int:
        """The pool after the rows were written; reading through it keeps the order."""
        target = token_rows(self.context, pool, type_id, token_bytes)
        stored = self.lib.set_rows(self.context, target, rows, self._slots[group])
        self.lib.build_forward_expand(self.graph, stored)
        return stored

    def _attend(
        self,
        inputs: _PartInputs,
        layer: int,
        q: int,
        at: int,
        stored: Sequence[int],
        pools: Sequence[int],
    ) -> int:
        """[n_head * dim_v, sequences * rows] of a part whose queries begin at row `at`."""
        c, part, lib, ctx = self.config, inputs.part, self.lib, self.context
        heads, group = c.heads_of(layer), self.pools.group_of[layer]
        head, token = 4 * heads.dim_k, 4 * heads.dim_k * c.n_head
        queries = lib.view_4d(
            ctx,
            q,
            heads.dim_k,
            part.rows,
            c.n_head,
            part.sequences,
            token,
            head,
            part.rows * token,
            at * token,
        )
        p = self.pools
        keys = self._tokens(inputs, group, stored[0], pools[0], p.key_type, heads.n, heads.dim_k)
        # flipped in the first view of the pool: it is the one that moves
        flipped = not self.flash
        values = self._tokens(inputs, group, stored[1], pools[1], p.value_type, heads.n, heads.dim_v, flipped)
        mask = inputs.masks[group]
        sinks = self.weights.tensor(f"blk.{layer}.attn_sinks.weight") if c.family.sinks else None
        if self.flash:
            out = lib.flash_attn_ext(
                ctx, queries, keys, values, mask, c.attention_scale, 0.0, c.attention_softcap
            )
            lib.flash_attn_ext_set_prec(out, PRECISION_F32)
            if sinks is not None:
                lib.flash_attn_ext_add_sinks(out, sinks)
        else:
            scores, scale = lib.mul_mat(ctx, keys, queries), c.attention_scale
            if c.attention_softcap:
                scores, scale = self.soft_capped(self.scaled(scores, scale), c.attention_softcap), 1.0
            scores = lib.soft_max_ext(ctx, scores, mask, scale, 0.0)
            if sinks is not None:
                lib.soft_max_add_sinks(scores, sinks)
            out = lib.mul_mat(ctx, lib.cont(ctx, values), scores)
            out = lib.cont(ctx, lib.permute(ctx, out, 0, 2, 1, 3))
        return lib.reshape_2d(ctx, out, c.n_head * heads.dim_v, part.sequences * part.rows)

    def _tokens(
        self,
        inputs: _PartInputs,
        group: int,
        stored: int,
        pool: int,
        type_id: int,
        heads: int,
        dim: int,
        flipped: bool = False,
    ) -> int:
        """[dim, span, heads, sequences]: keys or values, in place or gathered."""
        part, ctx = inputs.part, self.context
        span, blocks = part.spans[group], inputs.blocks.get(group)
        if blocks is None:
            view = heads_of_tokens(ctx, stored, type_id, heads, dim, span, 1, flipped)
            inputs.views.append((view, pool, group))
            return view
        if self.unpacks and type_id != TYPE_F16:
            gathered = self.lib.get_rows(ctx, block_rows(ctx, pool, stored, type_id), blocks)
            type_id = TYPE_F32
            if self.flash:
                gathered, type_id = self.lib.cast(ctx, gathered, TYPE_F16), TYPE_F16
        else:
            gathered = self.lib.get_rows(ctx, block_rows(ctx, pool, stored, TYPE_F32), blocks)
        return heads_of_tokens(ctx, gathered, type_id, heads, dim, span, part.sequences, flipped)

    def _part_inputs(self, part: Part) -> _PartInputs:
        inputs = _PartInputs(part)
        for g in self._groups:
            mask = self.lib.new_tensor_4d(self.context, TYPE_F16, part.spans[g], part.rows, 1, part.sequences)
            self.lib.set_input(mask)
            inputs.masks[g] = mask
            if not part.views[g]:
                inputs.blocks[g] = self.input(TYPE_I32, part.sequences * part.spans[g] // BLOCK_SIZE)
        return inputs


__all__ = ["PagedGraphBuilder", "Upload"]
