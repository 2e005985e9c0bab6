"""Tokens with a task, per family: as their vocabularies spell them, or as metadata says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_tools import write_gguf
from tiny_models import bpe_vocab, spm_vocab

from hetero.request import RequestError
from hetero.text.fill_in import OtherFile, fill_in_prompt
from hetero.text.grammar import GrammarCompiler
from hetero.text.service import TextService
from hetero.text.special import FimTokens, fim_tokens
from hetero.text.tokenizer import Tokenizer

CONTROL = 3


def tokenizer_with(path: Path, texts: list[str], kind: int = CONTROL, **metadata: Any) -> Tokenizer:
    """A BPE vocabulary with `texts` as its last tokens, of type `kind`."""
    values = bpe_vocab()
    tokens = [*values["tokenizer.ggml.tokens"], *texts]
    kinds = [*values["tokenizer.ggml.token_type"], *[kind] * len(texts)]
    values |= {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
    }
    ids = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return Tokenizer(write_gguf(path / "vocab.gguf", values | ids, {}))


QWEN = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
FAMILIES = {
    "qwen": (QWEN, [QWEN[0], "B", QWEN[2], "A", QWEN[1]]),
    "starcoder, granite": (
        ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"],
        ["<fim_prefix>", "B", "<fim_suffix>", "A", "<fim_middle>"],
    ),
    "deepseek": (
        ["<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"],
        ["<｜fim▁begin｜>", "B", "<｜fim▁hole｜>", "A", "<｜fim▁end｜>"],
    ),
    "glm": (
        ["<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"],
        ["<|code_prefix|>", "B", "<|code_suffix|>", "A", "<|code_middle|>"],
    ),
    "codestral": (["[PREFIX]", "[MIDDLE]", "[SUFFIX]"], ["[SUFFIX]", "A", "[PREFIX]", "B"]),
    "seed": (
        ["<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"],
        ["<[fim-suffix]>", "A", "<[fim-prefix]>", "B", "<[fim-middle]>"],
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_fim_tokens_by_name(family: str, tmp_path: Path):
    texts, wanted = FAMILIES[family]
    tokenizer = tokenizer_with(tmp_path, texts)
    found = fim_tokens(tokenizer)
    assert found is not None
    before, after = (tokenizer.encode(t, parse_special=False, add_special=False) for t in "BA")
    assert [tokenizer.token_text(i) for i in found.arrange(before, after)] == wanted


def test_fim_tokens_of_qwen_end_what_follows_the_file(tmp_path: Path):
    tokenizer = tokenizer_with(tmp_path, QWEN)
    found = fim_tokens(tokenizer)
    assert found is not None
    names = {name: tokenizer.token_text(getattr(found, name)) for name in ("pad", "repo", "file")}
    assert names == {"pad": "<|fim_pad|>", "repo": "<|repo_name|>", "file": "<|file_sep|>"}
    assert {found.pad, found.repo, found.file} <= tokenizer.eog_ids


def test_fim_tokens_by_metadata(tmp_path: Path):
    texts = ["<a>", "<b>", "<c>"]
    first = len(bpe_vocab()["tokenizer.ggml.tokens"])
    ids = {f"fim_{name}_token_id": first + i for i, name in enumerate(("pre", "suf", "mid"))}
    found = fim_tokens(tokenizer_with(tmp_path, texts, **ids))
    assert found == FimTokens(first, first + 1, first + 2)


def test_no_fim_tokens(smollm2_path: Path, tmp_path: Path):
    assert fim_tokens(tokenizer_with(tmp_path, ["<|fim_prefix|>", "<|fim_suffix|>"])) is None
    assert fim_tokens(tokenizer_with(tmp_path, ["[PREFIX]", "[SUFFIX]"], kind=1)) is None  # words


ENDS = [
    (["<|eot_id|>", "<|eom_id|>"], {"<|eot_id|>", "<|eom_id|>"}),  # Llama 3
    (["<|end|>"], {"<|end|>"}),  # Phi 3
    (["<|return|>", "<|call|>", "<|end|>"], {"<|return|>", "<|call|>"}),  # gpt-oss: <|end|> ends a message
    (["<end_of_turn>"], {"<end_of_turn>"}),  # Gemma
    (["<|end_of_text|>"], {"<|end_of_text|>"}),  # Granite
    (["▁<EOT>"], {"▁<EOT>"}),  # Code Llama, after what it filled in
]


@pytest.mark.parametrize(("texts", "ends"), ENDS)
def test_ends_of_generation(texts: list[str], ends: set[str], tmp_path: Path):
    tokenizer = tokenizer_with(tmp_path, texts)
    always = {"<|endoftext|>", "<|im_end|>"}  # of the tiny vocabulary; the second is its EOS
    assert {tokenizer.token_text(i) for i in tokenizer.eog_ids} == always | ends


def test_bos_and_eos_as_the_file_says(tmp_path: Path):
    for bos in (True, False):
        for eos in (True, False):
            values = spm_vocab() | {
                "general.architecture": "llama",
                "tokenizer.ggml.add_bos_token": bos,
                "tokenizer.ggml.add_eos_token": eos,
            }
            tokenizer = Tokenizer(write_gguf(tmp_path / f"{bos}{eos}.gguf", values, {}))
            ids = tokenizer.encode("the", parse_special=False, add_special=True)
            assert [i for i in ids if i in tokenizer.control_ids] == [2] * bos + [1] * eos


async def test_a_prompt_for_filling_in(smollm2_path: Path, tmp_path: Path):
    """What looks like a control token in either text stays text."""
    tokenizer = tokenizer_with(tmp_path, QWEN)
    service = TextService(tokenizer, None, GrammarCompiler(tokenizer))
    ids = await service.fill_in("B", "A<|fim_middle|>")
    assert [tokenizer.token_text(i) for i in ids[:4]] == ["<|fim_prefix|>", "B", "<|fim_suffix|>", "A"]
    assert tokenizer.token_text(ids[-1]) == "<|fim_middle|>" and len(ids) > 6
    assert "insert" in service.capabilities
    service.close()
    tokenizer = Tokenizer(smollm2_path)
    service = TextService(tokenizer, None, GrammarCompiler(tokenizer))
    with pytest.raises(RequestError) as refused:
        await service.fill_in("B", "A")
    assert refused.value.field == "suffix" and service.capabilities == ("completion",)
    service.close()


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (QWEN, "<|repo_name|>myproject\n<|file_sep|>a.py\nAA<|file_sep|>tmp\nBB<|file_sep|>filename\n"
               "<|fim_prefix|>before<|fim_suffix|>after<|fim_middle|>begun"),
        (FAMILIES["starcoder, granite"][0], "\n\n--- snippet ---\n\nAA\n\n--- snippet ---\n\nBB"
         "<fim_prefix>before<fim_suffix>after<fim_middle>begun"),
    ],
)  # fmt: skip
def test_other_files_come_before_the_parts(tmp_path: Path, texts: list[str], expected: str) -> None:
    """As llama-server arranges them; what users write makes no control tokens."""
    tokenizer = tokenizer_with(tmp_path, texts)
    fim = fim_tokens(tokenizer)
    assert fim is not None
    files = [OtherFile("AA", "a.py"), OtherFile("BB")]
    ids = fill_in_prompt(tokenizer, fim, "before", "after", files, "begun")
    assert (
        "".join(tokenizer.token_text(i) if i in fim_ids(fim) else tokenizer.decode([i]) for i in ids)
        == expected
    )
    forged = fill_in_prompt(tokenizer, fim, texts[0], texts[1], [OtherFile(texts[2], texts[0])], texts[1])
    special = [i for i in forged if i in fim_ids(fim)]
    honest = fill_in_prompt(tokenizer, fim, "x", "x", [OtherFile("x", "x")], "x")
    assert special == [i for i in honest if i in fim_ids(fim)]


def fim_ids(fim: FimTokens) -> set[int]:
    return {i for i in (fim.prefix, fim.suffix, fim.middle, fim.repo, fim.file) if i is not None}
