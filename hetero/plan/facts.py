"""What the planner needs to know of a model, from its file."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from backends.base import KVHeads
from backends.ggml.host_experts import host_layers, host_tensors
from backends.ggml.models.config import ModelConfig
from backends.ggml.models.tensors import common_tensors, end_tensors, host_tables, layer_tensors
from backends.kv_format import kept_as, row_bytes
from hetero.kv_types import F16, KVTypes
from hetero.plan.planner import Limits, ModelFacts
from quant.gguf import GGUFFile
from quant.types import GGML_TYPES

F16_BYTES = 2
F32_BYTES = 4
REPACKED = 1.03  # our matmul's copy of a weight, against its size in the file (backends/cpu/matmul/layout.py)
MASK = F16_BYTES  # of one query and one token that it may see, where a device gathers
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
LIVE_ROWS = 4  # n_ff- and n_embd-wide activations that a step's graph holds at the same time


def model_facts(
    gguf: GGUFFile,
    config: ModelConfig,
    limits: Limits,
    kv_types: KVTypes = F16,
    host_experts: int = 0,
) -> ModelFacts:
    """Sizes in bytes. Weights and the compute buffer are bounded from above: every weight repacked; the
    widest activations. The experts of the first `host_experts` layers that have such are in main memory.
    ValueError where the model's heads cannot be kept in `kv_types`.
    """
    heads = max(config.n_head * h.dim_k + h.n * (h.dim_k + h.dim_v) for h in _kinds(config))
    mixture = config.mixture
    experts = 0 if mixture is None else mixture.used * (config.n_embd + mixture.width) + mixture.shared_width
    if config.delta_net is not None:
        heads = max(2 * heads, config.delta_net.conv_width + config.delta_net.value_width)
    inputs = config.n_layer * config.layer_input
    row = LIVE_ROWS * (config.n_embd + max(experts, *config.ff_widths) + heads + inputs) * F32_BYTES
    sizes = {name: info.nbytes for name, info in gguf.tensors.items()}
    common = common_tensors(config)
    layers = [sum(sizes[name] for name in layer_names(config, layer)) for layer in range(config.n_layer)]
    moved = [0] * config.n_layer
    for layer in host_layers(config, 0, config.n_layer, host_experts):
        moved[layer] = sum(sizes[name] for name in host_tensors(config, layer))
        layers[layer] -= moved[layer]
    tied = HEAD not in sizes
    embed = sizes[EMBEDDING] * (1 if tied else REPACKED)
    ends = end_tensors(config, sizes, first=False, last=True)
    elsewhere = {*common, *host_tables(config)} - {EMBEDDING if tied else HEAD}
    head = REPACKED * sum(sizes[name] for name in ends if name not in elsewhere)
    facts = ModelFacts(
        n_ctx_train=config.n_ctx_train,
        layer_windows=config.layer_windows,
        kv_bytes_per_token=(),
        layer_bytes=tuple(int(REPACKED * size) for size in layers),
        embed_bytes=int(embed),
        head_bytes=int(head),
        shared_bytes=int(embed) if tied else 0,
        common_bytes=int(REPACKED * sum(sizes[name] for name in common)),
        last_cut=config.last_cut,
        compute_bytes=limits.max_num_batched_tokens * row,
        logits_bytes=(limits.max_num_seqs + limits.draft_rows) * config.n_vocab * F32_BYTES,
        rows_bytes=limits.max_num_batched_tokens * config.n_embd * F32_BYTES,
        host_experts=host_experts,
        moved_bytes=tuple(int(REPACKED * size) for size in moved) if host_experts else (),
        state_bytes=config.delta_net.state_bytes if config.delta_net else 0,
    )
    return with_kv_types(facts, config, limits, kv_types)


def with_kv_types(facts: ModelFacts, config: ModelConfig, limits: Limits, kv_types: KVTypes) -> ModelFacts:
    """The same model with its KV cache in other formats. ValueError as above."""
    plain = types_on(config, kv_types, own_kernels=False)
    layers = range(config.n_layer)
    tokens, plain_tokens = (
        tuple(token_bytes(config, layer, types) for layer in layers) for types in (kv_types, plain)
    )
    masks = len(set(config.layer_windows)) * limits.max_num_batched_tokens * MASK
    return replace(
        facts,
        kv_bytes_per_token=tokens,
        plain_kv_bytes_per_token=plain_tokens,
        kv_types=kv_types,
        plain_kv_types=plain,
        gather_bytes_per_token=max(plain_tokens) + _unpacked_bytes(config, plain) + masks,
    )


def types_on(config: ModelConfig, wanted: KVTypes, own_kernels: bool) -> KVTypes:
    """The formats that a device keeps, which may lack kernels of ours, where `wanted` were asked for."""
    return KVTypes(
        kept_as(wanted.keys, config.head_dim_k, own_kernels),
        kept_as(wanted.values, config.head_dim_v, own_kernels),
    )


def token_bytes(config: ModelConfig, layer: int, types: KVTypes) -> int:
    """Keys and values of a token that a layer has of its own."""
    if config.is_recurrent(layer) or config.kv_layer(layer) != layer:
        return 0
    heads = config.heads_of(layer)
    return heads.n * (row_bytes(types.keys, heads.dim_k) + row_bytes(types.values, heads.dim_v))


def _kinds(config: ModelConfig) -> set[KVHeads]:
    return {config.heads_of(layer) for layer in range(config.n_layer)}


def _unpacked_bytes(config: ModelConfig, types: KVTypes) -> int:
    """What a token takes more while it is attended: many drivers make q8_0 f16 first. Few attend keys and
    values of two formats: then we unpack them, through f32.
    """
    size = F16_BYTES if types.keys == types.values else F32_BYTES + F16_BYTES
    packed = types.keys != "f16", types.values != "f16"
    return max(
        h.n * size * sum(dim for dim, is_packed in zip(h[1:], packed, strict=True) if is_packed)
        for h in _kinds(config)
    )


def layer_names(config: ModelConfig, layer: int) -> list[str]:
    """Names of a layer's tensors in the file."""
    return list(layer_tensors(config, layer))


def layer_classes(gguf: GGUFFile, config: ModelConfig, host_experts: int = 0) -> tuple[int, ...]:
    """The class of each layer, numbered from 0: layers with the same window, tensor types and shapes, and
    experts in the same memory (see model_facts).

    They take the same time on a device.
    """
    numbers: dict[tuple, int] = {}
    away = set(host_layers(config, 0, config.n_layer, host_experts))
    classes = []
    for layer in range(config.n_layer):
        tensors = tuple((gguf.tensors[n].type, gguf.tensors[n].shape) for n in layer_names(config, layer))
        key = (config.layer_windows[layer], tensors, layer in away, config.shares_kv(layer))
        classes.append(numbers.setdefault(key, len(numbers)))
    return tuple(classes)


def count_parameters(gguf: GGUFFile) -> int:
    """Weights in the file, each tensor once."""
    total = 0
    for info in gguf.tensors.values():
        size = 1
        for extent in info.shape:
            size *= extent
        total += size
    return total


def quantization(gguf: GGUFFile) -> str:
    """The block format that holds most of the bytes, such as Q4_K."""
    weight: Counter[str] = Counter()
    for info in gguf.tensors.values():
        weight[GGML_TYPES[info.type].name] += info.nbytes
    return weight.most_common(1)[0][0].upper() if weight else "-"
