"""Vocabularies that would make libllama abort or hang are refused before it sees them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_tools import Typed, write_gguf
from tiny_models import bpe_vocab
from vocabularies import VOCABULARIES, charsmap

from hetero.text.charsmap import check_charsmap
from hetero.text.grammar import GrammarCompiler
from hetero.text.output import OutputError
from hetero.text.tokenizer import Tokenizer
from hetero.text.vocabulary import MAX_SPECIAL, MAX_TOKEN_BYTES


def write(path: Path, vocabulary: dict[str, Any]) -> Path:
    return write_gguf(path / "vocab.gguf", {"general.architecture": "llama", **vocabulary}, {})


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_every_kind_is_read(kind: str, tmp_path: Path):
    tokenizer = Tokenizer(write(tmp_path, VOCABULARIES[kind]()))
    ids = tokenizer.encode("the thing", parse_special=False, add_special=False)
    assert tokenizer.decode(ids).replace("▁", " ").strip() == "the thing"


def test_a_normalization_table_is_used(tmp_path: Path):
    tokenizer = Tokenizer(write(tmp_path, VOCABULARIES["t5"]()))
    upper, lower = (tokenizer.encode(t, parse_special=False, add_special=False) for t in ("A", "a"))
    assert upper == lower and tokenizer.token_text(upper[-1]) == "a"


def refusal(tmp_path: Path, vocabulary: dict[str, Any]) -> str:
    path = write(tmp_path, vocabulary)
    with pytest.raises(ValueError) as caught:
        Tokenizer(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message


def with_tokens(changes: dict[int, str]) -> list[str]:
    tokens = list(bpe_vocab()["tokenizer.ggml.tokens"])
    for at, text in changes.items():
        tokens[at] = text
    return tokens


TOKENS = [
    (with_tokens({5: "same", 300: "same"}), "the same text at 5 and 300"),
    (with_tokens({5: "zz\0b", 300: "zz\0c"}), "the same text at 5 and 300"),  # C sees one "zz" twice
    (with_tokens({5: "", 300: "[EMPTY_5]"}), "the same text at 5 and 300"),
    (with_tokens({5: "x" * (MAX_TOKEN_BYTES + 1)}), f"an entry of {MAX_TOKEN_BYTES + 1} bytes (5)"),
    (with_tokens({i: f"{i:04}" * 1024 for i in range(5, 300)}), "too much text in long entries"),
    ([], "has no vocabulary"),
]


@pytest.mark.parametrize(("tokens", "words"), TOKENS, ids=lambda v: v if isinstance(v, str) else "")
def test_tokens(tokens: list[str], words: str, tmp_path: Path):
    vocabulary = {**bpe_vocab(), "tokenizer.ggml.tokens": tokens}
    message = refusal(tmp_path, vocabulary)
    assert "tokenizer.ggml.tokens" in message and words in message and "download another" in message


def test_equal_to_a_reader_is_not_equal(tmp_path: Path):
    """Tokens that are not valid UTF-8 have the same text as others that are not."""
    tokens = [*with_tokens({}), *(f"w{i}" for i in range(1000)), "@1", "@2"]
    kinds = np.ones(len(tokens), np.int32)
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    path = write(tmp_path, bpe_vocab() | changes)
    path.write_bytes(path.read_bytes().replace(b"@1", b"w\xfe").replace(b"@2", b"w\xff"))
    assert Tokenizer(path).n_vocab == len(tokens)


KEYS = [
    (
        "llama",
        {"tokens": ["<unk>", "<s>", "</s>", "the"], "scores": None, "token_type": None},
        "the byte 0 (",
    ),
    ("llama", {"model": "none"}, "no vocabulary"),
    ("llama", {"model": "telepathy"}, "'telepathy', a kind of tokenizer that is not known"),
    ("llama", {"model": 3}, "tokenizer.ggml.model is not a string"),
    ("llama", {"model": None}, "tokenizer.ggml.model is missing"),
    ("llama", {"token_type": np.array([6] * 353, np.int32)}, "says that token 0 is a byte"),
    ("bert", {"token_type": np.array([6] * 58, np.int32)}, "says that token 0 is a byte"),
    ("bert", {"unknown_token_id": 99}, "unknown_token_id is 99, and there are 58 tokens"),
    ("bert", {"seperator_token_id": 99}, "seperator_token_id is missing"),
    ("bert", {"bos_token_id": 99}, "bos_token_id is missing"),
    ("t5", {"add_bos_token": True}, "bos_token_id is missing"),
    ("rwkv", {"tokens": ["<s>", "\\x00", "\\t", "t"], "token_type": None}, "no token for the byte 1 alone"),
    ("plamo2", {"tokens": [f"{i:04}" * 256 for i in range(5)], "token_type": None}, "too much text"),
    ("t5", {"precompiled_charsmap": Typed("f32", [1.0])}, "precompiled_charsmap is not an array of i8 or u8"),
    ("t5", {"precompiled_charsmap": Typed("u8", [255] * 9)}, "precompiled_charsmap announces"),
]


@pytest.mark.parametrize(("kind", "changes", "words"), KEYS)
def test_keys(kind: str, changes: dict[str, Any], words: str, tmp_path: Path):
    vocabulary = VOCABULARIES[kind]()
    for key, value in changes.items():
        vocabulary.pop(f"tokenizer.ggml.{key}", None)
        if value is not None:
            vocabulary[f"tokenizer.ggml.{key}"] = value
    assert words in refusal(tmp_path, vocabulary)


def test_an_absurd_number_of_special_tokens(tmp_path: Path):
    tokens = [f"<{i}>" for i in range(MAX_SPECIAL + 1)]
    kinds = np.full(len(tokens), 3, np.int32)
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    assert f"makes {len(tokens)} tokens special" in refusal(tmp_path, bpe_vocab() | changes)


def nodes(changes: dict[int, int], replacements: bytes = b"a\0") -> bytes:
    table = bytearray(charsmap()[:-2])
    for at, node in changes.items():
        struct.pack_into("<I", table, 4 + 4 * at, node)
    return bytes(table) + replacements


CHILD = 256 ^ ord("A")
TABLES = [
    (b"", None),
    (charsmap(), None),
    (nodes({0: 600 << 10}), "leads out"),
    (nodes({0: 1 << 9 | 200 << 10}), "leads out"),  # bit 9: the base is 256 times as large
    (nodes({CHILD: (CHILD ^ 512) << 10 | 1 << 8 | ord("A")}), "leads out"),
    (nodes({CHILD: (CHILD ^ 300) << 10 | ord("A"), 300 ^ ord("B"): 7 << 19 | ord("B")}), "leads out"),
    (nodes({384: 1 << 31 | 2}), "replacement outside"),
    (nodes({}, b"a"), "without an end"),
    (nodes({CHILD: (CHILD ^ 256) << 10 | ord("A")}), None),  # leads back to the root: read like any other
    (b"\1\0", "announces"),
    (struct.pack("<I", 0) + b"\0", None),
]


@pytest.mark.parametrize(("table", "words"), TABLES)
def test_normalization_tables(table: bytes, words: str | None):
    found = check_charsmap(table)
    assert found is None if words is None else words in (found or "")


def test_more_entries_than_tokens_are_as_good(tmp_path: Path):
    longer = np.zeros(400, np.int32)
    vocabulary = VOCABULARIES["llama"]() | {"tokenizer.ggml.scores": longer}
    assert Tokenizer(write(tmp_path, vocabulary)).n_vocab == 353  # and scores may be whole numbers


def test_a_vocabulary_without_an_end_can_hold_no_answer_to_a_schema(tmp_path: Path):
    tokenizer = Tokenizer(write(tmp_path, VOCABULARIES["rwkv"]()))
    assert tokenizer.eog_ids == frozenset()
    with pytest.raises(OutputError, match="cannot be enforced with this model's vocabulary"):
        GrammarCompiler(tokenizer).compile({"type": "json_object"})
