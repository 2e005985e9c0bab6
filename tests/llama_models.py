"""Tiny random models of families that only libllama computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf_tools import write_gguf
from tiny_models import bpe_vocab

N_EMBD, N_LAYERS, N_FF, N_CTX = 64, 2, 128, 512


class _Maker:
    def __init__(self, seed: int):
        self._rng = np.random.default_rng(seed)
        self.tensors: dict[str, np.ndarray] = {}

    def weights(self, **shapes: tuple[int, ...]) -> None:
        """Matrices [..., row length]; dots in a name are written as two underscores."""
        for name, shape in shapes.items():
            values = self._rng.standard_normal(shape) * shape[-1] ** -0.5
            self.tensors[name.replace("__", ".") + ".weight"] = values.astype(np.float32)

    def vectors(self, *names: str, size: int = N_EMBD, mean: float = 1.0) -> None:
        for name in names:
            self.tensors[name] = (mean + 0.2 * self._rng.standard_normal(size)).astype(np.float32)

    def reshape(self, name: str, *shape: int) -> None:
        self.tensors[name] = self.tensors[name].reshape(shape)


def _metadata(arch: str, **values: Any) -> dict[str, Any]:
    common = {
        "context_length": N_CTX, "embedding_length": N_EMBD, "block_count": N_LAYERS,
        "feed_forward_length": N_FF, "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    named = {key.replace("__", "."): value for key, value in values.items()}
    return {
        "general.architecture": arch,
        "general.name": f"tiny random {arch}",
        **{f"{arch}.{key}": value for key, value in (common | named).items()},
        **bpe_vocab(),
    }


def _ends(maker: _Maker, n_vocab: int, *, bias: bool) -> None:
    maker.weights(token_embd=(n_vocab, N_EMBD), output=(n_vocab, N_EMBD))
    maker.vectors("output_norm.weight")
    if bias:
        maker.vectors("output_norm.bias", mean=0.0)


def stablelm(path: Path, seed: int = 0) -> Path:
    """LayerNorm with biases, half of each head rotated."""
    values = _metadata(
        "stablelm", attention__head_count=4, attention__head_count_kv=2, rope__dimension_count=8
    )
    maker = _Maker(seed)
    _ends(maker, len(values["tokenizer.ggml.tokens"]), bias=True)
    for i in range(N_LAYERS):
        b = f"blk__{i}__"
        maker.weights(**{
            f"{b}attn_q": (64, N_EMBD), f"{b}attn_k": (32, N_EMBD), f"{b}attn_v": (32, N_EMBD),
            f"{b}attn_output": (N_EMBD, 64), f"{b}ffn_gate": (N_FF, N_EMBD), f"{b}ffn_up": (N_FF, N_EMBD),
            f"{b}ffn_down": (N_EMBD, N_FF),
        })  # fmt: skip
        maker.vectors(f"blk.{i}.attn_norm.weight", f"blk.{i}.ffn_norm.weight")
        maker.vectors(f"blk.{i}.attn_norm.bias", f"blk.{i}.ffn_norm.bias", mean=0.0)
    return write_gguf(path, values, maker.tensors)


def mpt(path: Path, seed: int = 0) -> Path:
    """ALiBi in place of rotation, one matrix for queries, keys and values."""
    values = _metadata("mpt", attention__head_count=4, attention__max_alibi_bias=8.0)
    maker = _Maker(seed)
    _ends(maker, len(values["tokenizer.ggml.tokens"]), bias=False)
    for i in range(N_LAYERS):
        b = f"blk__{i}__"
        maker.weights(**{
            f"{b}attn_qkv": (3 * 64, N_EMBD), f"{b}attn_output": (N_EMBD, 64),
            f"{b}ffn_up": (N_FF, N_EMBD), f"{b}ffn_down": (N_EMBD, N_FF),
        })  # fmt: skip
        maker.vectors(f"blk.{i}.attn_norm.weight", f"blk.{i}.ffn_norm.weight")
    return write_gguf(path, values, maker.tensors)


def mamba2(path: Path, seed: int = 0) -> Path:
    """A state in place of keys and values."""
    inner, state, groups, heads, conv = 128, 16, 1, 4, 4
    values = _metadata(
        "mamba2", ssm__conv_kernel=conv, ssm__inner_size=inner, ssm__state_size=state,
        ssm__time_step_rank=heads, ssm__group_count=groups, attention__head_count=0,
    )  # fmt: skip
    maker, channels = _Maker(seed), inner + 2 * groups * state
    _ends(maker, len(values["tokenizer.ggml.tokens"]), bias=False)
    for i in range(N_LAYERS):
        b = f"blk__{i}__"
        maker.weights(**{
            f"{b}ssm_in": (inner + channels + heads, N_EMBD), f"{b}ssm_conv1d": (channels, conv),
            f"{b}ssm_out": (N_EMBD, inner),
        })  # fmt: skip
        maker.vectors(f"blk.{i}.attn_norm.weight")
        maker.vectors(f"blk.{i}.ssm_conv1d.bias", size=channels, mean=0.0)
        maker.vectors(f"blk.{i}.ssm_dt.bias", size=heads, mean=0.0)
        for name, mean in (("ssm_a", -1.0), ("ssm_d", 1.0)):
            maker.vectors(f"blk.{i}.{name}", size=heads, mean=mean)
            maker.reshape(f"blk.{i}.{name}", heads, 1)
        maker.vectors(f"blk.{i}.ssm_norm.weight", size=inner // groups)
        maker.tensors[f"blk.{i}.ssm_norm.weight"] = maker.tensors[f"blk.{i}.ssm_norm.weight"].reshape(
            groups, -1
        )
    return write_gguf(path, values, maker.tensors)


def rwkv7(path: Path, seed: int = 0) -> Path:
    """A matrix for each head as the state, beside the last token's values."""
    head, rank = 64, 8  # ggml's operator wants heads as wide as its vectors
    ranks = {f"attention__{name}_lora_rank": rank for name in ("decay", "iclr", "value_residual_mix", "gate")}
    values = _metadata("rwkv7", wkv__head_size=head, token_shift_count=2, attention__head_count=0, **ranks)
    maker = _Maker(seed)
    _ends(maker, len(values["tokenizer.ggml.tokens"]), bias=True)
    maker.vectors("token_embd_norm.weight")
    maker.vectors("token_embd_norm.bias", mean=0.0)
    for i in range(N_LAYERS):
        b, mix = f"blk.{i}.", f"blk.{i}.time_mix_"
        names = ("key", "value", "receptance", "output")
        maker.weights(**{f"blk__{i}__time_mix_{name}": (N_EMBD, N_EMBD) for name in names})
        maker.weights(**{f"blk__{i}__time_mix_{x}1": (rank, N_EMBD) for x in "wavg"})
        maker.weights(**{f"blk__{i}__time_mix_{x}2": (N_EMBD, rank) for x in "wavg"})
        channel = {"channel_mix_key": (N_FF, N_EMBD), "channel_mix_value": (N_EMBD, N_FF)}
        maker.weights(**{f"blk__{i}__{name}": shape for name, shape in channel.items()})
        maker.vectors(*(f"{b}{name}.weight" for name in ("attn_norm", "attn_norm_2", "time_mix_ln")))
        maker.vectors(*(f"{b}{name}.bias" for name in ("attn_norm", "attn_norm_2", "time_mix_ln")), mean=0.0)
        maker.vectors(f"{mix}w0.weight", f"{mix}a0.weight", f"{mix}v0.weight", mean=0.0)
        maker.vectors(f"{mix}k_k.weight", f"{mix}k_a.weight", f"{mix}r_k.weight")
        maker.vectors(f"{mix}lerp_fused.weight", size=6 * N_EMBD, mean=0.5)
        maker.reshape(f"{mix}lerp_fused.weight", 6, 1, 1, N_EMBD)
        maker.vectors(f"{b}channel_mix_lerp_k.weight", mean=0.5)
        maker.reshape(f"{b}channel_mix_lerp_k.weight", 1, 1, N_EMBD)
    return write_gguf(path, values, maker.tensors)


def lfm2(path: Path, seed: int = 0) -> Path:
    """Convolutions over the last tokens in one layer, attention in the other."""
    taps, head = 3, 16
    values = _metadata(
        "lfm2", shortconv__l_cache=taps, attention__head_count=4,
        attention__head_count_kv=np.array([0, 2], np.int32),
    )  # fmt: skip
    maker = _Maker(seed)
    maker.weights(token_embd=(len(values["tokenizer.ggml.tokens"]), N_EMBD))
    maker.vectors("token_embd_norm.weight")
    for i in range(N_LAYERS):
        b = f"blk__{i}__"
        maker.weights(**{
            f"{b}ffn_gate": (N_FF, N_EMBD), f"{b}ffn_up": (N_FF, N_EMBD), f"{b}ffn_down": (N_EMBD, N_FF),
        })  # fmt: skip
        maker.vectors(f"blk.{i}.attn_norm.weight", f"blk.{i}.ffn_norm.weight")
    maker.weights(**{
        "blk__0__shortconv__conv": (N_EMBD, taps), "blk__0__shortconv__in_proj": (3 * N_EMBD, N_EMBD),
        "blk__0__shortconv__out_proj": (N_EMBD, N_EMBD), "blk__1__attn_q": (64, N_EMBD),
        "blk__1__attn_k": (32, N_EMBD), "blk__1__attn_v": (32, N_EMBD), "blk__1__attn_output": (N_EMBD, 64),
    })  # fmt: skip
    maker.vectors("blk.1.attn_q_norm.weight", "blk.1.attn_k_norm.weight", size=head)
    return write_gguf(path, values, maker.tensors)


FAMILIES = {"stablelm": stablelm, "mpt": mpt, "mamba2": mamba2, "rwkv7": rwkv7, "lfm2": lfm2}
