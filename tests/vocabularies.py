"""Small vocabularies of the kinds that only libllama's tokenizers use; tiny_models.py has the others."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from gguf_tools import Typed
from tiny_models import spm_vocab

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _vocab(model: str, tokens: list[str], kinds: list[int], **more: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def wpm_vocab() -> dict[str, Any]:
    """BERT's: whole words first, then pieces."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁the", "ing", *(f"▁{c}" for c in LETTERS), *LETTERS]
    ids = {"padding_token_id": 0, "unknown_token_id": 1, "bos_token_id": 2, "seperator_token_id": 3}
    return _vocab("bert", tokens, [3, 2, 3, 3] + [1] * (len(tokens) - 4), **ids)


def charsmap() -> bytes:
    """A normalization table that makes "A" an "a" (layout: hetero/text/charsmap.py)."""
    nodes, root, child, value = [0] * 512, 256, 256 ^ ord("A"), 384
    nodes[0] = root << 10
    nodes[child] = (child ^ value) << 10 | 1 << 8 | ord("A")
    nodes[value] = 1 << 31
    return struct.pack("<I", 4 * len(nodes)) + struct.pack(f"<{len(nodes)}I", *nodes) + b"a\0"


def ugm_vocab() -> dict[str, Any]:
    """T5's: unigrams with their log probabilities, and a normalization table."""
    tokens = ["<pad>", "</s>", "<unk>", "▁", "▁the", "ing", *LETTERS]
    table = Typed("i8", [b - 256 if b > 127 else b for b in charsmap()])
    scores = np.array([0.0, 0.0, 0.0, *(-float(i) for i in range(1, len(tokens) - 2))], np.float32)
    kinds = [3, 3, 2] + [1] * (len(tokens) - 3)
    return _vocab("t5", tokens, kinds, scores=scores, precompiled_charsmap=table)


def rwkv_vocab() -> dict[str, Any]:
    """RWKV's: each byte, escaped, and a few words."""
    tokens = ["<s>", *(f"\\x{b:02x}" for b in range(256)), "the", "ing", "\\n\\n"]
    return _vocab("rwkv", tokens, [1] * len(tokens))


def plamo_vocab() -> dict[str, Any]:
    """PLaMo 2's: bytes, characters and pieces with scores."""
    tokens = [
        "<unk>",
        "<bos>",
        "<eos>",
        "<pad>",
        *(f"<0x{b:02X}>" for b in range(256)),
        *LETTERS,
        "the",
        "ing",
    ]
    kinds = [2, 3, 3, 3] + [6] * 256 + [1] * (len(tokens) - 260)
    return _vocab("plamo2", tokens, kinds, scores=np.linspace(0, -9, len(tokens), dtype=np.float32))


VOCABULARIES = {
    "llama": spm_vocab,
    "bert": wpm_vocab,
    "t5": ugm_vocab,
    "rwkv": rwkv_vocab,
    "plamo2": plamo_vocab,
}
