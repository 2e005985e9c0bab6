"""KV pools of the layers on a CPU device, and the parameters of the operators that use them."""

from __future__ import annotations

import ctypes as C
from collections.abc import Iterable, Sequence

import numpy as np

from backends.base import BlockCopyLike
from backends.cpu import attention as attend
from backends.cpu import attention_pools, kv_codes, kv_store
from backends.cpu import rope_store as store
from backends.cpu.matmul import SCRATCH_BYTES
from backends.cpu.step import QUERY_ROWS, StepHeader, aligned_empty
from backends.ggml.devices import Device
from backends.ggml.lib import TYPE_F16, ggml
from backends.ggml.models.config import ModelConfig, ModelError
from backends.ggml.models.tensors import has_head_norms
from backends.ggml.weights import DeviceTensors, Weights
from backends.kv_format import kv_homes


class CpuKV:
    """Pools for `layers`, some of which may share one: see kv_format.kv_homes. `group_of[layer]` and
    `num_blocks[group]` say which blocks a layer has.

    `kv_types`: formats of keys and of values, of kv_format.KV_TYPES. ModelError where one cannot hold the
    model's heads.
    Memory is asked for at once but touched only as blocks are first written.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        weights: Weights,
        layers: Sequence[int],
        group_of: dict[int, int],
        num_blocks: Sequence[int],
        kv_types: tuple[str, str],
    ):
        self.home_of = kv_homes(config, layers)
        self.config, self.layers, self.group_of = config, sorted(set(self.home_of.values())), group_of
        kinds = {config.heads_of(layer) for layer in layers} or {config.heads_of(0)}
        for heads in kinds:
            if heads.dim_k % 16 or heads.dim_v % 16:
                raise ModelError(f"head dimensions {heads.dim_k} and {heads.dim_v} must be multiples of 16")
        share = config.n_head // min(heads.n for heads in kinds)
        if share > QUERY_ROWS:
            raise ModelError(f"more than {QUERY_ROWS} query heads share a KV head ({share})")
        widest = max(max(heads.dim_k, heads.dim_v) for heads in kinds)
        self._ropes = [r for r in dict.fromkeys(config.rope_of(layer) for layer in layers) if r is not None]
        factors = [_factors(weights, rope.factors) for rope in self._ropes]
        self.header = StepHeader(
            len(num_blocks),
            self._ropes,
            factors,
            config.n_layer,
            max(1, QUERY_ROWS // share),
            device.threads,
            max(attend.SCRATCH_BYTES, 4 * widest),
            config.query_growth,
        )
        self._kinds = [kv_codes.FORMATS[t] for t in kv_types]
        try:
            parts = {h: [*map(kv_codes.part_bytes, kv_types, h[1:])] for h in kinds}
        except ValueError as error:
            raise ModelError(str(error)) from None
        # of a head in a block: of keys and of values
        self._part_bytes = {layer: parts[config.heads_of(layer)] for layer in self.layers}
        blocks = [num_blocks[group_of[layer]] for layer in self.layers]
        sizes = [self._block_bytes(layer, which) for which in (0, 1) for layer in self.layers]
        self._pools = DeviceTensors(
            device, [(TYPE_F16, size // 2, n) for size, n in zip(sizes, blocks * 2, strict=True)]
        )
        half = len(self.layers)
        addresses = [ggml().get_data(h) for h in self._pools.handles]
        for address, size in zip(addresses, sizes, strict=True):
            C.memset(address, 0, size)  # the scratch block stands in for blocks that left a window
        self._keys = dict(zip(self.layers, addresses[:half], strict=True))
        self._values = dict(zip(self.layers, addresses[half:], strict=True))
        self._weights = weights
        self._ones = np.ones(widest, np.float32)  # where a norm has no weight
        self.matmul_scratch = aligned_empty(device.threads * SCRATCH_BYTES)
        self.expert_scratch = aligned_empty(device.threads * _expert_scratch_bytes(config))
        self._parameters: dict[tuple[str, int], np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        return self._pools.nbytes

    def copy_blocks(self, copies: Iterable[BlockCopyLike]) -> None:
        """Carry out copy-on-write in every layer of the copies' groups."""
        for copy in copies:
            for layer in self.layers:
                if self.group_of[layer] != copy.group:
                    continue
                for base, size in self._of_layer(layer):
                    C.memmove(base + copy.dst * size, base + copy.src * size, size)

    def parts(self, group: int) -> list[tuple[int, int]]:
        """(address, bytes of a block) of the group's pools: keys and values by layer. See moves.Pools."""
        return [
            part for layer in self.layers if self.group_of[layer] == group for part in self._of_layer(layer)
        ]

    def _block_bytes(self, layer: int, which: int) -> int:
        """Of a block's keys (0) or values (1)."""
        return self.config.heads_of(layer).n * self._part_bytes[layer][which]

    def _of_layer(self, layer: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(address, bytes of a block) of keys and of values."""
        keys, values = (self._block_bytes(layer, which) for which in (0, 1))
        return (self._keys[layer], keys), (self._values[layer], values)

    def store_parameters(self, layer: int, fused: bool) -> np.ndarray:
        """int64 words for the rope_store operator of a layer; the array lives as long as the pools.

        `fused`: q, k and v come side by side in one tensor.
        """
        c, rope = self.config, self.config.rope_of(layer)
        p = np.zeros(store.NUM_PARAMS, np.int64)
        self._common(p, layer, store)
        if rope is not None:  # else nothing is rotated, and no table read
            p[store.P_ROPE_WORD] = self.header.rope_word(self._ropes.index(rope))
            p[store.P_ROTATED], p[store.P_NEOX] = rope.n_rot, int(rope.neox)
        p[store.P_SCALE], p[store.P_EPS] = _float_bits(c.attention_scale), _float_bits(c.norm_eps)
        if has_head_norms(c, layer):
            p[store.P_QUERY_NORM] = ggml().get_data(self._weights.tensor(f"blk.{layer}.attn_q_norm.weight"))
            if not c.shares_kv(layer):
                p[store.P_KEY_NORM] = ggml().get_data(self._weights.tensor(f"blk.{layer}.attn_k_norm.weight"))
        if c.family.value_norm:
            p[store.P_VALUE_NORM] = self._ones.ctypes.data
        p[store.P_FUSED] = int(fused)
        if c.shares_kv(layer):
            p[store.P_KV_HEADS] = 0  # rows of queries alone, and nothing to store
        for word, which in ((store.P_STORE_KEY, kv_store.KEYS), (store.P_STORE_VALUE, kv_store.VALUES)):
            p[word] = kv_store.compiled_store(self._kinds[which], which).address
        return self._parameters.setdefault(("store", layer), p)

    def attention_parameters(self, layer: int) -> np.ndarray:
        """int64 words for the attention operator of a layer; the array lives as long as the pools."""
        p = np.zeros(attend.NUM_PARAMS, np.int64)
        self._common(p, layer, attend)
        p[attend.P_WINDOW] = self.config.layer_windows[layer] or 0
        p[attend.P_SOFTCAP] = _float_bits(self.config.attention_softcap)
        if self.config.family.sinks:
            p[attend.P_SINKS] = ggml().get_data(self._weights.tensor(f"blk.{layer}.attn_sinks.weight"))
        p[attend.P_COUNTER] = self.header.counter_address(layer)
        p[attend.P_SCORES] = attention_pools.compiled_scores(self._kinds[0]).address
        p[attend.P_VALUES] = attention_pools.compiled_values(self._kinds[1]).address
        return self._parameters.setdefault(("attend", layer), p)

    def _common(self, p: np.ndarray, layer: int, names) -> None:
        heads = self.config.heads_of(layer)
        p[names.P_HEADER], p[names.P_GROUP] = self.header.address, self.group_of[layer]
        p[names.P_HEADS], p[names.P_KV_HEADS] = self.config.n_head, heads.n
        p[names.P_DIM_K], p[names.P_DIM_V] = heads.dim_k, heads.dim_v
        home = self.home_of[layer]
        p[names.P_KEY_POOL], p[names.P_VALUE_POOL] = self._keys[home], self._values[home]
        p[names.P_KEY_BYTES], p[names.P_VALUE_BYTES] = self._part_bytes[home]

    def close(self) -> None:
        self._pools.close()


def _factors(weights: Weights, name: str | None) -> np.ndarray | None:
    """float64 copy of a float32 weight vector on the host."""
    if name is None:
        return None
    return weights.values(name).astype(np.float64)


def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _expert_scratch_bytes(config: ModelConfig) -> int:
    """Of one thread."""
    if config.mixture is None:
        return 0
    from backends.cpu import expert_words  # compiled only for models that have experts

    return expert_words.SCRATCH_BYTES
