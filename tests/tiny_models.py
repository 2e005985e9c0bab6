"""Tiny random models that libllama loads, and what libllama computes with them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp.llama_cpp as llama
import numpy as np
from gguf_tools import Raw, write_gguf

from backends.ggml.lib import ggml
from quant.types import GGML_TYPES, TYPE_IDS, row_bytes

_PAIR_TEXT = (
    "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve "
    "co me de hi ri ro ic ne ea ra ce li ch ll be ma si om ur"
)
_PAIRS = _PAIR_TEXT.split()


def _byte_letters() -> list[str]:
    """GPT-2's printable letter of each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, extra = {b: chr(b) for b in printable}, 256
    for byte in range(256):
        if byte not in letters:
            letters[byte], extra = chr(extra), extra + 1
    return [letters[b] for b in range(256)]


def bpe_vocab() -> dict[str, Any]:
    """A byte-level BPE vocabulary of 311 tokens with ChatML's control tokens (0 to 2) and no BOS."""
    merges = [f"{p[0]} {p[1]}" for p in _PAIRS] + ["th e", "in g"]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = control + _byte_letters() + [m.replace(" ", "") for m in merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3] * 3 + [1] * (len(tokens) - 3), np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def spm_vocab() -> dict[str, Any]:
    """An SPM vocabulary of 353 tokens: byte tokens, BOS (2), Gemma's turn tokens, no space prefix."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    letters = ["▁", *(chr(c) for c in range(33, 127) if chr(c).islower() or chr(c) in ".,!?<>|/_")]
    pieces = [*_PAIRS, "the", "ing", "▁t", "▁a", "▁the"]
    tokens = control + [f"<0x{b:02X}>" for b in range(256)] + letters + pieces
    kinds = [3] * 6 + [6] * 256 + [1] * (len(letters) + len(pieces))
    kinds[3] = 2
    scores = [0.0] * 262 + [-1000.0] * len(letters) + [-float(i + 1) for i in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }


# Per format: where its f16 fields lie in a block, and what they are for values of deviation 1.
_SCALES: dict[str, list[tuple[int, float]]] = {
    "Q4_0": [(0, 1 / 4.6)],
    "Q4_1": [(0, 1 / 4.6), (2, -7.5 / 4.6)],
    "Q5_0": [(0, 1 / 9.2)],
    "Q5_1": [(0, 1 / 9.2), (2, -15.5 / 9.2)],
    "Q8_0": [(0, 1 / 74)],
    "Q4_K": [(0, 1 / 200), (2, 7.5 / 200)],
    "Q5_K": [(0, 1 / 400), (2, 15.5 / 400)],
    "Q6_K": [(208, 1 / 1350)],
    "Q3_K": [(108, 1 / 42)],
}


def random_tensor(
    rng: np.random.Generator, shape: tuple[int, ...], type_name: str, deviation: float
) -> Raw | np.ndarray:
    """Weights [..., row length], about normal: random blocks with sane scales in the quantized formats."""
    if type_name in ("F32", "F16"):
        dtype = np.float32 if type_name == "F32" else np.float16
        return (rng.standard_normal(shape) * deviation).astype(dtype)
    if type_name == "BF16":
        values = (rng.standard_normal(shape) * deviation).astype(np.float32)
        return Raw("BF16", shape[::-1], values.view(np.uint16)[..., 1::2].tobytes())
    fmt = GGML_TYPES[TYPE_IDS[type_name]]
    nbytes = math.prod(shape[:-1]) * row_bytes(TYPE_IDS[type_name], shape[-1])
    if type_name not in _SCALES:
        return Raw(type_name, shape[::-1], _quantized(rng, shape, type_name, deviation, nbytes))
    blocks = rng.integers(0, 256, (nbytes // fmt.nbytes, fmt.nbytes), np.uint8)
    for offset, scale in _SCALES[type_name]:
        noise = rng.uniform(0.8, 1.2, len(blocks))
        field = (noise * scale * deviation).astype(np.float16)
        blocks[:, offset : offset + 2] = field.view(np.uint8).reshape(-1, 2)
    return Raw(type_name, shape[::-1], blocks.tobytes())


def _quantized(
    rng: np.random.Generator, shape: tuple[int, ...], type_name: str, deviation: float, nbytes: int
) -> bytes:
    """Normal values as ggml quantizes them."""
    values = (rng.standard_normal(shape) * deviation).astype(np.float32)
    out, weights = np.empty(nbytes, np.uint8), np.ones(shape[-1], np.float32)
    sizes = (0, math.prod(shape[:-1]), shape[-1])
    type_id = TYPE_IDS[type_name]
    ggml().quantize_chunk(type_id, values.ctypes.data, out.ctypes.data, *sizes, weights.ctypes.data)
    return out.tobytes()


def _metadata(arch: str, n_layers: int, n_embd: int, n_ff: int, n_ctx: int) -> dict[str, Any]:
    values = {
        "general.architecture": arch,
        "general.name": f"tiny random {arch}",
        f"{arch}.context_length": n_ctx,
        f"{arch}.embedding_length": n_embd,
        f"{arch}.block_count": n_layers,
        f"{arch}.feed_forward_length": n_ff,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0 if arch == "llama" else 1000000.0,
    }
    return values | (spm_vocab() if arch == "gemma3" else bpe_vocab())


class _Maker(NamedTuple):
    rng: np.random.Generator
    type_name: str

    def weight(self, *shape: int) -> Raw | np.ndarray:
        return random_tensor(self.rng, shape, self.type_name, shape[-1] ** -0.5)

    def norm(self, size: int) -> np.ndarray:
        return (1 + 0.2 * self.rng.standard_normal(size)).astype(np.float32)

    def layer(
        self, arch: str, n_embd: int, n_ff: int, q: int, k: int, head_dim: int, n_experts: int
    ) -> dict[str, Any]:
        norms = {"attn_norm": n_embd, "ffn_norm": n_embd}
        if arch != "llama":
            norms |= {"attn_q_norm": head_dim, "attn_k_norm": head_dim}
        if arch == "gemma3":
            norms |= {"post_attention_norm": n_embd, "post_ffw_norm": n_embd}
        suffix, experts = ("_exps", (n_experts,)) if n_experts else ("", ())
        return {
            "attn_q": self.weight(q, n_embd),
            "attn_k": self.weight(k, n_embd),
            "attn_v": self.weight(k, n_embd),
            "attn_output": self.weight(n_embd, q),
            f"ffn_gate{suffix}": self.weight(*experts, n_ff, n_embd),
            f"ffn_up{suffix}": self.weight(*experts, n_ff, n_embd),
            f"ffn_down{suffix}": self.weight(*experts, n_embd, n_ff),
            **{name: self.norm(size) for name, size in norms.items()},
            **({"ffn_gate_inp": self.router(n_experts, n_embd)} if n_experts else {}),
        }

    def router(self, rows: int, columns: int) -> Raw | np.ndarray:
        """F32, as quantizers leave it; logits of deviation 2 make clear choices."""
        return random_tensor(self.rng, (rows, columns), "F32", 2 * columns**-0.5)


def tiny_model(
    path: Path,
    arch: str = "llama",
    seed: int = 0,
    *,
    n_layers: int = 2,
    n_embd: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 16,
    n_ff: int = 128,
    n_ctx: int = 512,
    tied: bool = True,
    weight_type: str = "F32",
    embedding_type: str = "F32",
    sliding_window: int = 16,
    sliding_window_pattern: int | None = None,
    rope_freqs: bool = False,
    n_experts: int = 0,
    n_experts_used: int = 2,
    chat_template: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write a random `llama`, `qwen3moe` (BPE vocabulary) or `gemma3` (SPM) model and return `path`.

    Rows are `n_embd`, `n_ff` or `n_heads * head_dim` long: all must hold whole blocks of the types.
    """
    values = _metadata(arch, n_layers, n_embd, n_ff, n_ctx) | {
        f"{arch}.attention.head_count": n_heads,
        f"{arch}.attention.head_count_kv": n_kv_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.rope.dimension_count": head_dim,
    }
    if arch == "gemma3":
        values["gemma3.attention.sliding_window"] = sliding_window
        if sliding_window_pattern is not None:
            values["gemma3.attention.sliding_window_pattern"] = sliding_window_pattern
    if n_experts:
        values |= {f"{arch}.expert_count": n_experts, f"{arch}.expert_used_count": n_experts_used}
    if arch == "qwen3moe":
        values["qwen3moe.expert_feed_forward_length"] = n_ff
    if chat_template is not None:
        values["tokenizer.chat_template"] = chat_template
    values.update(metadata or {})

    maker = _Maker(np.random.default_rng(seed), weight_type)
    n_vocab = len(values["tokenizer.ggml.tokens"])
    tensors: dict[str, Raw | np.ndarray] = {
        "token_embd.weight": random_tensor(maker.rng, (n_vocab, n_embd), embedding_type, 0.3),
        "output_norm.weight": maker.norm(n_embd),
    }
    if not tied:
        tensors["output.weight"] = maker.weight(n_vocab, n_embd)
    if rope_freqs:
        tensors["rope_freqs.weight"] = maker.rng.uniform(1, 8, head_dim // 2).astype(np.float32)
    for layer in range(n_layers):
        widths = (n_heads * head_dim, n_kv_heads * head_dim, head_dim)
        parts = maker.layer(arch, n_embd, n_ff, *widths, n_experts)
        tensors.update({f"blk.{layer}.{name}.weight": t for name, t in parts.items()})
    return write_gguf(path, values, tensors)


@llama.llama_log_callback
def _quiet(level, text, user_data):
    return


def libllama_logits(
    path: Path, token_ids: Sequence[int], n_ctx: int = 512, flash: bool = False, kv_type: int | None = None
) -> np.ndarray:
    """What libllama computes for one sequence: logits float32 [len(token_ids), n_vocab].

    Its cache is F32, or F16 with flash attention, as it runs by default, or of the ggml type `kv_type`.
    """
    llama.llama_log_set(_quiet, ctypes.c_void_p(0))
    llama.llama_backend_init()
    model_params = llama.llama_model_default_params()
    model_params.use_extra_bufts = False  # its AMX buffers crash where the CPU only claims to have AMX
    model_params.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(str(path).encode(), model_params)
    assert model, f"libllama cannot load {path}"
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_ctx, n_ctx
    params.n_threads = params.n_threads_batch = 2
    params.type_k = params.type_v = int(flash) if kv_type is None else kv_type
    params.flash_attn_type = int(flash)
    context = llama.llama_init_from_model(model, params)
    batch = llama.llama_batch_init(len(token_ids), 0, 1)
    try:
        batch.n_tokens = len(token_ids)
        for i, token_id in enumerate(token_ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token_id, i, 1, 1
            batch.seq_id[i][0] = 0
        assert llama.llama_decode(context, batch) == 0
        n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        rows = [
            np.ctypeslib.as_array(ctypes.cast(row, ctypes.POINTER(ctypes.c_float)), (n_vocab,)).copy()
            for row in (llama.llama_get_logits_ith(context, i) for i in range(len(token_ids)))
        ]
        return np.stack(rows)
    finally:
        llama.llama_batch_free(batch)
        llama.llama_free(context)
        llama.llama_model_free(model)
