"""Prompts whose continuation stands between two texts, with other files before them.

    <repo>myproject\\n <file>a.py\\n text of a ... <file>filename\\n <pre>before<suf>after<mid>begun
    \\n\\n--- snippet ---\\n\\n text of a ... <pre>before<suf>after<mid>begun     without such tokens

As llama-server arranges them (server-common.cpp, format_prompt_infill), after the repository-level form of
Qwen2.5-Coder (arXiv 2409.12186). Texts of users make no control tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.text.special import FimTokens
from hetero.text.tokenizer import Tokenizer

PROJECT, THIS_FILE, OTHER_FILE = "myproject", "filename", "tmp"  # names of what has none
SNIPPET = "\n\n--- snippet ---\n\n"


@dataclass(frozen=True, slots=True)
class OtherFile:
    """Text of another file, with its name where that is known."""

    text: str
    name: str = OTHER_FILE


def fill_in_prompt(
    tokenizer: Tokenizer, fim: FimTokens, before: str, after: str, files: Sequence[OtherFile], begun: str
) -> list[int]:
    """Token ids, BOS included where the model has one. `begun`: how the middle begins."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, parse_special=False, add_special=False)

    ids = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    if files:
        if fim.repo is not None:
            ids += [fim.repo, *encode(f"{PROJECT}\n")]
        for file in files:
            ids += encode(SNIPPET) if fim.file is None else [fim.file, *encode(f"{file.name}\n")]
            ids += encode(file.text)
        if fim.file is not None:
            ids += [fim.file, *encode(f"{THIS_FILE}\n")]
    return [*ids, *fim.arrange(encode(before), encode(after)), *encode(begun)]
