"""Tokens for filling in the middle. BOS, EOS and ends of generation are the Tokenizer's.

Ids come from `tokenizer.ggml.fim_*_token_id`, else from the texts that libllama knows (llama-vocab.cpp);
the families that it does not know are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import llama_cpp.llama_cpp as llama

from hetero.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FimTokens:
    """Ids of the tokens around the parts of a fill-in-the-middle prompt.

    `middle` None: the middle follows the prefix as it is (Codestral). `suffix_first`: the model was taught
    suffix, prefix, middle; else prefix, suffix, middle. `repo` and `file` stand before the names of a
    repository and of a file, None where the model knows no other files. `pad` ends or fills.
    """

    prefix: int
    suffix: int
    middle: int | None = None
    pad: int | None = None
    repo: int | None = None
    file: int | None = None
    suffix_first: bool = False

    def arrange(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The prompt whose continuation stands between `before` and `after`, without BOS."""
        first, last = [self.prefix, *before], [self.suffix, *after]
        ordered = [*last, *first] if self.suffix_first else [*first, *last]
        return ordered if self.middle is None else [*ordered, self.middle]


_LIBLLAMA: dict[str, Callable[[int], int]] = {
    "prefix": llama.llama_vocab_fim_pre,
    "suffix": llama.llama_vocab_fim_suf,
    "middle": llama.llama_vocab_fim_mid,
    "pad": llama.llama_vocab_fim_pad,
    "repo": llama.llama_vocab_fim_rep,
    "file": llama.llama_vocab_fim_sep,
}
# (prefix, suffix, middle, suffix_first) of families that libllama does not know by name.
_BY_NAME = (
    ("[PREFIX]", "[SUFFIX]", None, True),  # Codestral: mistral_common's InstructTokenizer.encode_fim
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", True),  # Seed-Coder, Seed-OSS
)


def fim_tokens(tokenizer: Tokenizer) -> FimTokens | None:
    """The model's FIM tokens; None if it was not taught to fill in."""
    found = {name: ask(tokenizer.vocab_pointer) for name, ask in _LIBLLAMA.items()}
    ids = {name: i for name, i in found.items() if 0 <= i < tokenizer.n_vocab}
    if {"prefix", "suffix", "middle"} <= ids.keys():
        pad, repo, file = (ids.get(name) for name in ("pad", "repo", "file"))
        return FimTokens(ids["prefix"], ids["suffix"], ids["middle"], pad, repo, file)
    for prefix, suffix, middle, suffix_first in _BY_NAME:
        known = token_ids(tokenizer, [t for t in (prefix, suffix, middle) if t is not None])
        if known is not None:
            last = known[2] if middle is not None else None
            return FimTokens(known[0], known[1], last, suffix_first=suffix_first)
    return None


def token_ids(tokenizer: Tokenizer, texts: Iterable[str]) -> list[int] | None:
    """The ids of tokens that are written as `texts`; None unless each is a single control or user-defined
    token.
    """
    ids = []
    for text in texts:
        encoded = tokenizer.encode(text, parse_special=True, add_special=False)
        if len(encoded) != 1 or tokenizer.token_text(encoded[0]) != text:
            return None
        ids.append(encoded[0])
    return ids
