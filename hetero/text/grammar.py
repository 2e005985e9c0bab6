"""Output that must follow a JSON schema: the allowed next tokens, by llguidance."""

from __future__ import annotations

import ctypes
import json
import threading
from collections import OrderedDict
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from hetero.text.tokenizer import Tokenizer

MAX_SCHEMA_CHARS = 1 << 17  # OpenAI's own bound is 120,000
CACHED_GRAMMARS = 64
# Room for an object of 5000 properties (OpenAI's bound); a mask then takes about 10 ms.
_LIMITS = LLParserLimits(
    max_grammar_size=200_000, max_items_in_row=20_000, step_max_items=200_000, verbose_errors=False
)
# Between tokens of JSON: a space, or a new line with its indentation. Without an upper bound a small model
# can write blanks until its context is full.
_WHITESPACE = r"( |\n[ \t]{0,40})"


class Grammar:
    """Where one request's output stands in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher):
        self._matcher = matcher

    def fork(self) -> Grammar:
        """An independent copy at the same place."""
        return Grammar(self._matcher.deep_copy())

    def fill_mask(self, row: np.ndarray) -> None:
        """Set the bits of the tokens that may come next.

        `row` is int32 [ceil(n_vocab / 32)], C-contiguous; token t is bit t % 32 of row[t // 32].
        ValueError if the grammar proves too complex.
        """
        if row.dtype != np.int32 or row.ndim != 1 or not row.flags.c_contiguous:
            raise TypeError("the mask must be one contiguous row of int32")
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise ValueError(f"response_format: {_one_line(self._matcher.get_error())}")

    def accept(self, token_id: int) -> bool:
        """Take the sampled token. False if the grammar does not allow it."""
        return self._matcher.consume_token(token_id)

    @property
    def is_finished(self) -> bool:
        """The output is complete and nothing but an end token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


class GrammarCompiler:
    """Grammars for one vocabulary. Safe from several threads."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ll_tokenizer: LLTokenizer | None = None
        self._cache: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, response_format: dict[str, Any] | None) -> Grammar | None:
        """A grammar at its start for `response_format` as in OpenAI's API; None if any text will do.

        ValueError names what is wrong with the format, or why the schema cannot be enforced. The first call
        takes up to a second, to index the vocabulary.
        """
        schema = _schema_of(response_format)
        if schema is None:
            return None
        try:
            key = json.dumps(schema)  # order matters: properties are written in the schema's order
        except RecursionError:
            raise ValueError("response_format: the schema is nested too deeply") from None
        if len(key) > MAX_SCHEMA_CHARS:
            raise ValueError(f"response_format: the schema has more than {MAX_SCHEMA_CHARS} characters")
        with self._lock:
            matcher = self._cache.pop(key, None) or self._compile(key)
            self._cache[key] = matcher
            if len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
            return Grammar(matcher.deep_copy())

    def _compile(self, schema: str) -> LLMatcher:
        if self._ll_tokenizer is None:
            self._ll_tokenizer = _index_vocabulary(self._tokenizer)
        options = {"whitespace_pattern": _WHITESPACE}
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"response_format: {_one_line(str(error))}") from None
        matcher = LLMatcher(self._ll_tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            probe = matcher.deep_copy()
            probe.compute_bitmask()  # finds schemas that nothing can satisfy
            matcher = probe if probe.is_error() else matcher
        if matcher.is_error():
            raise ValueError(f"response_format: the schema is not usable: {_one_line(matcher.get_error())}")
        return matcher


def _index_vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """llguidance's view of the vocabulary, as `llguidance.llamacpp` makes it from deprecated functions."""
    return LLTokenizer.from_llamacpp(  # type: ignore[attr-defined]  # missing in its stubs
        tokens=[tokenizer.grammar_bytes(token_id) for token_id in range(tokenizer.n_vocab)],
        vocab_ptr=tokenizer.vocab_pointer,
        tokenize_fptr=ctypes.cast(llama.llama_tokenize, ctypes.c_void_p).value,
        eos_token=sorted(tokenizer.eog_ids),
        slices=LLTokenizer.json_slices(),
    )


def _schema_of(response_format: Any) -> dict[str, Any] | None:
    """The JSON schema that a `response_format` asks for."""
    if response_format is None:
        return None
    if not isinstance(response_format, dict):
        raise ValueError("response_format must be an object")
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise ValueError(f"response_format.type must be text, json_object or json_schema, not {kind!r}")
    wrapper = response_format.get("json_schema")
    if not isinstance(wrapper, dict):
        raise ValueError("response_format.json_schema must be an object")
    schema = wrapper.get("schema")
    if not isinstance(schema, dict):
        raise ValueError("response_format.json_schema.schema must be an object")
    return schema


def _one_line(text: str) -> str:
    return " ".join(text.replace("<non-verbose/>", "").split())[:500]
