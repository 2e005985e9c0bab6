"""Which tensors a model has, with their shapes, and the check of a file against that."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from backends.ggml.lib import TYPE_F32
from backends.ggml.models.delta_net import CONVOLUTION
from backends.ggml.models.layer_inputs import EMBEDDINGS, NORM, PROJECTION
from backends.ggml.models.metadata import ModelError
from backends.ggml.models.mixture import FUSED_EXPERTS, ExpertWeights, expert_weights
from quant.gguf import GGUFFile
from quant.types import GGML_TYPES

if TYPE_CHECKING:
    from backends.ggml.models.config import ModelConfig

EMBEDDING, HEAD, OUTPUT_NORM = "token_embd.weight", "output.weight", "output_norm.weight"
FUSED_QKV, OUTPUT_SCALE = "attn_qkv", "layer_output_scale"
ROUTER_SCALE, EXPERT_SCALE = "ffn_gate_inp.scale", "ffn_down_exps.scale"
Shapes = dict[str, tuple[int, ...]]  # by name; row length first


def optional_tensors(names: Iterable[str]) -> frozenset[str]:
    """Those of a file's tensors that decide how the graph is built: biases, fused q, k, v, norms of heads."""
    weights = (FUSED_QKV, "attn_v", "attn_q_norm", "attn_k_norm", OUTPUT_SCALE, FUSED_EXPERTS)
    ends = (".bias", EXPERT_SCALE, *(f".{name}.weight" for name in weights))
    return frozenset(n for n in names if n.endswith(ends))


def bias_of(weight: str) -> str:
    """The name of a weight's bias."""
    return f"{weight.removesuffix('.weight')}.bias"


def layer_tensors(config: ModelConfig, layer: int) -> Shapes:
    """A block's tensors by name, as blk.3.attn_q.weight."""
    recurrent = config.is_recurrent(layer)
    shapes = _norms(config) if recurrent else _attention(config, layer) | _norms(config)
    if config.has_experts(layer):
        shapes |= _mixture(config, layer)
    if not config.has_experts(layer) or config.has_experts_beside(layer):
        shapes |= _feed_forward(config, layer)
    found: Shapes = {}
    if recurrent and config.delta_net is not None:
        found = {f"blk.{layer}.{n}": s for n, s in config.delta_net.tensors(config.n_embd).items()}
    for name, shape in shapes.items():
        weight = f"blk.{layer}.{name}.weight"
        found[weight] = shape
        if bias_of(weight) in config.present and (len(shape) > 1 or config.family.norm == "layer"):
            found[bias_of(weight)] = shape[1:] or shape
    scale = output_scale(config, layer)
    if scale is not None and config.family.value_norm:
        found[scale] = (1,)
    mixture = config.mixture
    if config.has_experts(layer) and mixture is not None and mixture.options.selection_bias:
        found[f"blk.{layer}.exp_probs_b.bias"] = (mixture.count,)
    if config.has_experts_beside(layer) and mixture is not None:
        found[f"blk.{layer}.{ROUTER_SCALE}"] = (config.n_embd,)
        if f"blk.{layer}.{EXPERT_SCALE}" in config.present:
            found[f"blk.{layer}.{EXPERT_SCALE}"] = (mixture.count,)
    if mixture is not None and mixture.options.biases:
        found |= {bias_of(weight): found[weight][1:] for weight in expert_weights(layer)[2:]}
    return found


def mixture_tensors(config: ModelConfig, layer: int) -> list[str]:
    """Names of what a layer's chosen experts need: the norm before them, the router, matrices and biases."""
    names = experts_of(config, layer)
    rest = {f"blk.{layer}.{name}" for name in ("exp_probs_b.bias", ROUTER_SCALE, EXPERT_SCALE)}
    rest |= set(map(bias_of, names))
    return [name for name in layer_tensors(config, layer) if name in names or name in rest]


def experts_of(config: ModelConfig, layer: int) -> ExpertWeights:
    """Names of the tensors of a layer's experts, and of the norm before them."""
    norm = "pre_ffw_norm_2" if config.has_experts_beside(layer) else config.family.ffn_norm
    return expert_weights(layer, norm, f"blk.{layer}.{FUSED_EXPERTS}.weight" in config.present)


def end_tensors(config: ModelConfig, names: Iterable[str], first: bool, last: bool) -> Shapes:
    """What a stage needs beside its blocks, if it is the first or the last one. `names`: of the file."""
    c, known = config, set(names)
    shapes: Shapes = {}
    if first or (last and HEAD not in known):
        shapes[EMBEDDING] = (c.n_embd, c.n_vocab)
    if last:
        shapes[OUTPUT_NORM] = (c.n_embd,)
        if bias_of(OUTPUT_NORM) in c.present and c.family.norm == "layer":
            shapes[bias_of(OUTPUT_NORM)] = (c.n_embd,)
        if HEAD in known:
            shapes[HEAD] = (c.n_embd, c.n_vocab)
            if bias_of(HEAD) in c.present:
                shapes[bias_of(HEAD)] = (c.n_vocab,)
    return shapes | host_tables(c) | common_tensors(c)


def common_tensors(c: ModelConfig) -> Shapes:
    """What every stage has on its device: factors of RoPE, and what inputs of layers are made with."""
    ropes = [rope for rope in c.layer_ropes if rope is not None]
    shapes: Shapes = {
        name: (rope.n_rot // 2,) for rope in ropes for name in (rope.factors, rope.long_factors) if name
    }
    if c.layer_input:
        shapes |= {PROJECTION: (c.n_embd, c.n_layer * c.layer_input), NORM: (c.layer_input,)}
    return shapes


def host_tables(c: ModelConfig) -> Shapes:
    """Matrices whose rows every stage looks up in the mapped file, for the inputs of its layers."""
    if not c.layer_input:
        return {}
    return {EMBEDDING: (c.n_embd, c.n_vocab), EMBEDDINGS: (c.n_layer * c.layer_input, c.n_vocab)}


def _attention(c: ModelConfig, layer: int) -> Shapes:
    heads = c.heads_of(layer)
    q, k, v = c.n_head * heads.dim_k, heads.n * heads.dim_k, heads.n * heads.dim_v
    if has_fused_qkv(c, layer):
        shapes: Shapes = {FUSED_QKV: (c.n_embd, q + k + v)}
    else:
        queries = 2 * q if c.family.gated_attention else q
        shapes = {"attn_q": (c.n_embd, queries), "attn_k": (c.n_embd, k), "attn_v": (c.n_embd, v)}
    if has_keys_as_values(c, layer):
        del shapes["attn_v"]
    if c.shares_kv(layer):
        shapes = {"attn_q": shapes["attn_q"]}
    shapes["attn_output"] = (c.n_head * heads.dim_v, c.n_embd)
    if c.family.sinks:
        shapes["attn_sinks"] = (c.n_head,)
    if has_head_norms(c, layer):
        shapes |= {"attn_q_norm": (heads.dim_k,), "attn_k_norm": (heads.dim_k,)}
    elif c.family.qk_norm == "row":
        shapes |= {"attn_q_norm": (q,), "attn_k_norm": (k,)}
    if c.shares_kv(layer):
        shapes.pop("attn_k_norm", None)
    return shapes


def has_fused_qkv(c: ModelConfig, layer: int) -> bool:
    """Whether a layer's query, key and value matrices are one."""
    return (
        f"blk.{layer}.{FUSED_QKV}.weight" in c.present and not c.family.recurrent and not c.shares_kv(layer)
    )


def has_keys_as_values(c: ModelConfig, layer: int) -> bool:
    """Whether a layer's values are its keys, before their norm."""
    names = (f"blk.{layer}.{name}.weight" for name in ("attn_v", FUSED_QKV))
    return c.family.value_norm and not c.shares_kv(layer) and not any(name in c.present for name in names)


def output_scale(c: ModelConfig, layer: int) -> str | None:
    """The name of the number that a block's output is multiplied with, where it has one."""
    name = f"blk.{layer}.{OUTPUT_SCALE}.weight"
    return name if name in c.present else None


def has_head_norms(c: ModelConfig, layer: int) -> bool:
    """Whether a layer's query and key heads are normed, each by itself."""
    if c.family.qk_norm == "file":
        return f"blk.{layer}.attn_q_norm.weight" in c.present
    return c.family.qk_norm == "heads"


def _mixture(c: ModelConfig, layer: int) -> Shapes:
    m = c.mixture
    assert m is not None
    inputs: Shapes = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), (c.n_embd, m.width, m.count))
    if f"blk.{layer}.{FUSED_EXPERTS}.weight" in c.present:
        inputs = {FUSED_EXPERTS: (c.n_embd, 2 * m.width, m.count)}
    down = (m.width, c.n_embd, m.count)
    shapes: Shapes = {"ffn_gate_inp": (c.n_embd, m.count), **inputs, "ffn_down_exps": down}
    if m.options.beside:
        shapes |= dict.fromkeys(("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"), (c.n_embd,))
    if m.shared:
        shapes["ffn_gate_shexp"] = shapes["ffn_up_shexp"] = (c.n_embd, m.shared_width)
        shapes["ffn_down_shexp"] = (m.shared_width, c.n_embd)
    if m.options.shared_gate:
        shapes["ffn_gate_inp_shexp"] = (c.n_embd,)
    return shapes


def _feed_forward(c: ModelConfig, layer: int) -> Shapes:
    width = c.ff_widths[layer]
    up = 2 * width if c.family.ffn == "fused" else width
    gate: Shapes = {"ffn_gate": (c.n_embd, width)} if c.family.ffn == "gated" else {}
    return {**gate, "ffn_up": (c.n_embd, up), "ffn_down": (width, c.n_embd)}


def _norms(c: ModelConfig) -> Shapes:
    names: list[str] = []
    if c.family.pre_norms:
        names += ["attn_norm"] if c.family.parallel else ["attn_norm", c.family.ffn_norm]
    if c.family.post_norms:
        names += ["post_attention_norm", "post_ffw_norm"]
    norms: Shapes = dict.fromkeys(names, (c.n_embd,))
    if c.layer_input:
        norms |= {"inp_gate": (c.n_embd, c.layer_input), "proj": (c.layer_input, c.n_embd)}
        norms["post_norm"] = (c.n_embd,)
    return norms


def check_tensors(gguf: GGUFFile, config: ModelConfig, layers: tuple[int, int], spare: int) -> None:
    """Every weight of these layers present with its shape, and none that would be silently left out, but for
    those of `spare` layers behind the last one. Raises ModelError.
    """
    first, last = layers
    wanted = {n: s for i in range(first, last) for n, s in layer_tensors(config, i).items()}
    wanted |= end_tensors(config, gguf.tensors, first == 0, last == config.n_layer)
    for name, shape in wanted.items():
        info = gguf.tensors.get(name)
        if info is None:
            raise ModelError(f"{gguf.path.name}: tensor {name} is missing")
        if info.shape != shape:
            raise ModelError(f"{gguf.path.name}: tensor {name} has shape {info.shape}, expected {shape}")
        if (len(shape) == 1 or name.endswith(CONVOLUTION)) and info.type != TYPE_F32:
            kind = GGML_TYPES[info.type].name
            what = "norms and biases" if len(shape) == 1 else "convolutions"
            raise ModelError(f"{gguf.path.name}: tensor {name} is {kind}; {what} must be F32")
    for name in gguf.tensors:
        if name in wanted or (spare and _is_beyond(name, config.n_layer)) or _is_unused(config, name):
            continue
        raise ModelError(
            f"{gguf.path.name}: tensor {name} is not part of family {config.family.architecture}"
        )


def _is_unused(config: ModelConfig, name: str) -> bool:
    """Whether a tensor makes keys and values that a layer would have if it did not share those of another."""
    match = re.fullmatch(r"blk\.(\d+)\.(attn_k|attn_v|attn_k_norm)\.weight", name)
    return match is not None and int(match[1]) < config.n_layer and config.shares_kv(int(match[1]))


def _is_beyond(name: str, n_layer: int) -> bool:
    """Whether a tensor is of a layer behind the last one."""
    match = re.match(r"blk\.(\d+)\.", name)
    return match is not None and int(match[1]) >= n_layer


__all__ = [
    "Shapes",
    "bias_of",
    "check_tensors",
    "common_tensors",
    "end_tensors",
    "experts_of",
    "has_fused_qkv",
    "has_head_norms",
    "has_keys_as_values",
    "host_tables",
    "layer_tensors",
    "mixture_tensors",
    "optional_tensors",
    "output_scale",
]
