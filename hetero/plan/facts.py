"""What the planner needs to know of a model, from its file."""

from __future__ import annotations

from collections import Counter

from backends.ggml.models.config import ModelConfig
from hetero.plan.planner import Limits, ModelFacts
from quant.gguf import GGUFFile
from quant.types import GGML_TYPES

F16_BYTES = 2
F32_BYTES = 4
REPACKED = 1.03  # our matmul's copy of a weight, against its size in the file (backends/cpu/matmul/layout.py)
LIVE_ROWS = 4  # n_ff- and n_embd-wide activations that a step's graph holds at the same time


def model_facts(gguf: GGUFFile, config: ModelConfig, limits: Limits) -> ModelFacts:
    """Sizes in bytes. KV is f16. Weights and the compute buffer are bounded from above: every weight
    repacked, and the embeddings kept twice where they are the output head too; the widest activations.
    """
    token = config.n_head_kv * (config.head_dim_k + config.head_dim_v) * F16_BYTES
    heads = config.n_head * config.head_dim_k + config.n_head_kv * (config.head_dim_k + config.head_dim_v)
    experts = config.n_expert_used * (config.n_embd + config.n_ff) or config.n_ff
    row = LIVE_ROWS * (config.n_embd + experts + heads) * F32_BYTES
    logits = limits.max_num_seqs * config.n_vocab * F32_BYTES
    weights = REPACKED * sum(t.nbytes for t in gguf.tensors.values())
    if "output.weight" not in gguf.tensors:
        weights += gguf.tensors["token_embd.weight"].nbytes
    return ModelFacts(
        n_ctx_train=config.n_ctx_train,
        layer_windows=config.layer_windows,
        kv_bytes_per_token=(token,) * config.n_layer,
        weight_bytes=int(weights),
        compute_bytes=limits.max_num_batched_tokens * row + logits,
    )


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
