"""What a vocabulary must be like before libllama may read it.

libllama aborts the process, never returns or reads past arrays where a vocabulary breaks what its code takes
for granted, and a C++ exception while a text is tokenized ends the process too. Each rule here names the
place in llama-vocab.cpp (llama.cpp of llama-cpp-python 0.3.36) that it protects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hetero.text.charsmap import check_charsmap
from quant.gguf import ArrayValue, GGUFError, LazyArray

PREFIX = "tokenizer.ggml."
MAX_TOKENS = 1 << 22
MAX_MERGES = 1 << 23
MAX_SPECIAL = 1 << 17  # a regular expression is made of them
MAX_TOKEN_BYTES = 4096  # tries are built by recursion, a call for each byte
MAX_SQUARES = 1 << 27  # bytes: llama_decode_text may write a token once for each of its characters
MAX_CUBES = 1 << 30  # steps: llm_tokenizer_plamo2 looks at every part of every end of a token
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # LLAMA_TOKEN_TYPE_*
_MODELS = ("llama", "gpt2", "bert", "t5", "rwkv", "plamo2", "gemma4", "hybriddna", "whitespace")
_DEFAULT_UNKNOWN = {"bert": 100, "t5": 2}  # what stands for unknown text is one of their tokens
AGAIN = "convert the model again, or download another file of it"


def check_vocabulary(path: Path, metadata: Mapping[str, object]) -> None:
    """Raises GGUFError, naming the file and the key, unless libllama can read and use the vocabulary."""
    _Vocabulary(path, metadata).check()


class _Vocabulary:
    def __init__(self, path: Path, metadata: Mapping[str, object]):
        self.path, self.metadata = path, metadata

    def error(self, key: str, what: str) -> GGUFError:
        return GGUFError(f"{self.path}: {PREFIX}{key} {what}; {AGAIN}")

    def check(self) -> None:
        tokens = self.strings("tokens", MAX_TOKENS)
        if not tokens:
            raise GGUFError(f"{self.path}: the file has no vocabulary ({PREFIX}tokens); {AGAIN}")
        model = self.model()
        unique = self.check_tokens(tokens, model)
        kinds = self.check_arrays(tokens, model)
        if model == "llama":
            self.check_bytes(unique)
        elif model == "rwkv":
            self.check_escaped_bytes(tokens)
        elif model in _DEFAULT_UNKNOWN:
            self.check_unknown(len(tokens), _DEFAULT_UNKNOWN[model])
        if kinds is not None:
            self.check_kinds(tokens, kinds, model)

    def model(self) -> str:
        """The kind of tokenizer."""
        model = self.metadata.get(f"{PREFIX}model")
        if not isinstance(model, str):
            raise self.error("model", f"{'is missing' if model is None else 'is not a string'}")
        if model in ("none", "no_vocab"):
            raise GGUFError(f"{self.path}: the file has no vocabulary ({PREFIX}model is {model!r}); {AGAIN}")
        if model not in _MODELS:
            raise self.error("model", f"is {model[:40]!r}, a kind of tokenizer that is not known here")
        return model

    def array(self, key: str, elements: tuple[str, ...]) -> Sequence | None:
        """An array, None for none. The elements' types are those that libllama would take them for."""
        value = self.metadata.get(PREFIX + key)
        if value is None:
            return None
        if not isinstance(value, (ArrayValue, LazyArray)) or value.element not in elements:
            raise self.error(key, f"is not an array of {' or '.join(elements)}")
        return value

    def strings(self, key: str, limit: int) -> list[bytes]:
        value = self.array(key, ("str",))
        if value is not None and len(value) > limit:
            raise self.error(key, f"has {len(value)} entries, more than {limit}")
        if isinstance(value, LazyArray):
            return value.raw_strings()
        return [text.encode("utf-8", "replace") for text in value or ()]

    def check_tokens(self, tokens: list[bytes], model: str) -> set[bytes]:
        """None too long, no two alike as C sees them: an assertion of `load`. The tokens as a set."""
        sizes = np.fromiter(map(len, tokens), np.int64, len(tokens))
        if sizes.max() > MAX_TOKEN_BYTES:
            at = int(sizes.argmax())
            raise self.error(
                "tokens", f"has an entry of {sizes[at]} bytes ({at}), more than {MAX_TOKEN_BYTES}"
            )
        work = int((sizes**3).sum() if model == "plamo2" else (sizes**2).sum())
        if work > (MAX_CUBES if model == "plamo2" else MAX_SQUARES):
            raise self.error("tokens", "holds too much text in long entries")
        seen = tokens
        if not sizes.all() or b"\0" in b"".join(tokens):
            seen = [token.split(b"\0", 1)[0] or b"[EMPTY_%d]" % i for i, token in enumerate(tokens)]
        unique = set(seen)
        if len(unique) != len(seen):
            first: dict[bytes, int] = {}
            i = next(i for i, token in enumerate(seen) if first.setdefault(token, i) != i)
            raise self.error("tokens", f"has the same text at {first[seen[i]]} and {i}")
        return unique

    def check_arrays(self, tokens: list[bytes], model: str) -> np.ndarray | None:
        """The arrays beside the tokens have an entry for each. The tokens' types, None for none."""
        for key, elements in (("scores", ("f32", "i32")), ("token_type", ("i32",))):
            value = self.array(key, elements)
            if value is not None and len(value) < len(tokens):
                raise self.error(key, f"has {len(value)} entries for {len(tokens)} tokens")
        merges = self.array("merges", ("str",))
        if merges is not None and len(merges) > MAX_MERGES:
            raise self.error("merges", f"has {len(merges)} entries, more than {MAX_MERGES}")
        charsmap = self.array("precompiled_charsmap", ("i8", "u8"))
        if model == "t5" and charsmap is not None:
            reason = check_charsmap(np.array(charsmap[:], np.int64).astype(np.uint8).tobytes())
            if reason:
                raise self.error("precompiled_charsmap", reason)
        kinds = self.array("token_type", ("i32",))
        return None if kinds is None else np.array(kinds[: len(tokens)], np.int32)

    def check_bytes(self, tokens: set[bytes]) -> None:
        """What is in no other token is spelled in bytes, each of which must be there: `byte_to_token`."""
        for byte in range(256):
            if b"<0x%02X>" % byte not in tokens and (byte == 0 or bytes([byte]) not in tokens):
                raise self.error("tokens", f"has no token for the byte {byte} (<0x{byte:02X}>)")

    def check_escaped_bytes(self, tokens: list[bytes]) -> None:
        """Each byte alone is a token: else RWKV's `tokenize` never ends, or the id is -1."""
        alone = {_rwkv_byte(found[0]) for token in tokens if (found := _RWKV_BYTE.fullmatch(token))}
        missing = set(range(256)) - alone
        if missing:
            raise self.error("tokens", f"has no token for the byte {min(missing)} alone")

    def check_unknown(self, count: int, default: int) -> None:
        """Unknown text becomes a token, which must be one: else its id is -1."""
        value = self.metadata.get(f"{PREFIX}unknown_token_id")
        given = value if isinstance(value, int) and 0 <= value < count else default
        if given >= count:
            raise self.error("unknown_token_id", f"is {value}, and there are {count} tokens")

    def check_kinds(self, tokens: list[bytes], kinds: np.ndarray, model: str) -> None:
        """Byte tokens can be read as such (`token_to_byte`), and not everything is special."""
        special = int(np.isin(kinds, (_UNKNOWN, _CONTROL, _USER_DEFINED)).sum())
        if special > MAX_SPECIAL:
            raise self.error("token_type", f"makes {special} tokens special, more than {MAX_SPECIAL}")
        for i in np.flatnonzero(kinds == _BYTE) if model not in ("rwkv", "plamo2") else ():
            if model == "bert" or not _BYTE_TOKEN.fullmatch(tokens[i]):
                raise self.error(
                    "token_type", f"says that token {i} is a byte, and its text is not like <0x0A>"
                )


_BYTE_TOKEN = re.compile(rb"<0x[0-9A-Fa-f]{2}>")
_RWKV_BYTE = re.compile(rb"\\x..|\\[^x]|[^\\]", re.DOTALL)


def _rwkv_byte(text: bytes) -> int:
    """The byte that one character or escape of an RWKV token stands for: llama_unescape_rwkv_token."""
    if text[0] != ord("\\"):
        return text[0]
    if text[1] != ord("x"):
        return {ord("t"): 9, ord("n"): 10, ord("r"): 13}.get(text[1], text[1])
    value = 0
    for digit in text[2:]:
        signed = digit - 256 if digit > 127 else digit
        value = value * 16 + (signed - ord("a") + 10 if signed >= ord("a") else signed - ord("0")) % 256
    return value % 256
