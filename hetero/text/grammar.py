"""Output that must have a certain form: the allowed next tokens, by llguidance."""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from hetero.request import RequestError
from hetero.text.deep_stack import on_deep_stack
from hetero.text.output import MAX_CHARS, OutputError, field_of, grammar_of
from hetero.text.tokenizer import Tokenizer
from hetero.text.tools.forced import ForcedCalls, arguments_schemas, around, own_form
from hetero.text.tools.lark import Inexpressible

CACHED_GRAMMARS = 64
CACHED_CHARS = 1 << 18  # of their sources; a compiled one takes up to 400 times as much
RELAXED_TOOLS = 1024
MAX_TOOLS_CHARS = 1 << 20  # of the schemas of all tools of a request; a schema of these takes milliseconds
# Room for an object of 5000 properties (OpenAI's bound); a mask then takes about 10 ms.
_LIMITS = LLParserLimits(
    max_grammar_size=200_000, max_items_in_row=20_000, step_max_items=200_000, verbose_errors=False
)

# What an answer's grammar may take: for the largest schemas a mask takes 10 ms.
FIRST_SECONDS = 2.0
TOKEN_SECONDS = 0.05
_NOT_ALLOWED = "doesn't satisfy the grammar"  # llguidance of a token that the mask had not let through


class Grammar:
    """Where one request's output stands in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, field: str = "response_format"):
        """`field` is the client's name for it, for errors."""
        self._matcher = matcher
        self._field = field
        self._seconds = 0.0  # of CPU time
        self._num_tokens = 0

    def fork(self) -> Grammar:
        """An independent copy at the same place."""
        return Grammar(self._matcher.deep_copy(), self._field)

    def fill_mask(self, row: np.ndarray) -> None:
        """Set the bits of the tokens that may come next.

        `row` is int32 [ceil(n_vocab / 32)], C-contiguous; token t is bit t % 32 of row[t // 32].
        RequestError that names the client's field if the grammar proves too complex.
        """
        if row.dtype != np.int32 or row.ndim != 1 or not row.flags.c_contiguous:
            raise TypeError("the mask must be one contiguous row of int32")
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise self._too_complex(_one_line(self._matcher.get_error()))
        self._account(began)

    def accept(self, token_id: int) -> bool:
        """Take the sampled token. False if the grammar does not allow it; RequestError as of `fill_mask`."""
        began = time.thread_time()
        taken = self._matcher.consume_token(token_id)
        if self._matcher.is_error():  # and then what it returns means nothing
            why = _one_line(self._matcher.get_error())
            if _NOT_ALLOWED in why:
                return False
            raise self._too_complex(why)
        self._num_tokens += 1
        self._account(began)
        return taken

    def _account(self, began: float) -> None:
        """Everybody's step waits while one grammar thinks: what has cost far more than it may is ended."""
        self._seconds += time.thread_time() - began
        if self._seconds > FIRST_SECONDS + TOKEN_SECONDS * self._num_tokens:
            raise self._too_complex(f"{self._seconds:.1f} s for {self._num_tokens} tokens")

    def _too_complex(self, why: str) -> RequestError:
        """A small grammar can need a state for each way in which a long text might go on."""
        return RequestError(
            f"{self._field}: it proved too complex in the middle of the answer ({why})",
            self._field,
            "grammar_too_complex",
        )

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
        self._relaxed: OrderedDict[str, int] = OrderedDict()  # tools' schemas: which relaxation they need
        self._own_forms: OrderedDict[str, bool] = OrderedDict()  # grammars of calls: whether they compile
        self._lock = threading.Lock()

    def compile(
        self,
        output: Mapping[str, Any] | None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        several: bool = True,
        template: str = "",
        prompt_tail: str = "",
    ) -> Grammar | None:
        """A grammar at its start for an answer with this output; None if any text will do.

        `output` is as in hetero.text.output. With `tools` (OpenAI's) the answer calls one of them, or
        `several`; or, with an output too, is that. `template` is the chat template's source and `prompt_tail`
        the prompt's end, where the model may reason first. Raises OutputError. The first call takes up to a
        second if `warm_up` was not called.
        """
        inner = grammar_of(output)
        if inner is None and not tools:
            return None
        if sum(len(json.dumps(tool["function"].get("parameters"))) for tool in tools) > MAX_TOOLS_CHARS:
            raise OutputError(f"their schemas have more than {MAX_TOOLS_CHARS} characters in all", "tools")
        grammars = [] if inner is None else [{"name": "output", **inner}]
        told = [self._arguments(tool["function"], template) for tool in tools]
        field = "tools" if tools else field_of(output)

        def matcher(told: Sequence[tuple[str, dict[str, Any], bool]]) -> LLMatcher:
            calls = ForcedCalls(told, several) if told else None
            outer = around(template, prompt_tail, self._mark_token, calls, inner is not None)
            answer = [] if outer is None else [{"name": "answer", "lark_grammar": outer}]
            return self._matcher(json.dumps({"grammars": answer + grammars}), field)

        try:
            return Grammar(matcher(told).deep_copy(), field)
        except (OutputError, Inexpressible):
            if not any(is_own for *_, is_own in told):
                raise
        # Each by itself can be enforced in the family's own form, all of them together cannot.
        return Grammar(matcher([(name, schema, False) for name, schema, _ in told]).deep_copy(), field)

    def _arguments(self, function: Mapping[str, Any], template: str) -> tuple[str, dict[str, Any], bool]:
        """A tool's name, the strictest schema of its arguments that can be enforced, and whether that can be
        done in the own form of the template's family."""
        parameters = function.get("parameters") or {}
        schemas, key = arguments_schemas(parameters), json.dumps(parameters)
        with self._lock:
            which = self._relaxed.get(key)
        if which is None:
            which = self._strictest(schemas)
            with self._lock:
                _keep(self._relaxed, key, which)
        name, schema = function["name"], schemas[which]
        return name, schema, self._has_own_form(template, name, schema)

    def _has_own_form(self, template: str, name: str, schema: Mapping[str, Any]) -> bool:
        """Kept like the schemas that `_arguments` finds, by the grammar, of which there is one a family."""
        grammar = own_form(template, name, schema, self._mark_token)
        if grammar is None or len(grammar) > MAX_CHARS:
            return False
        with self._lock:
            compiles = self._own_forms.get(grammar)
        if compiles is None:
            compiles = True
            try:
                _compile(self._index("tools"), json.dumps({"grammars": [{"lark_grammar": grammar}]}), "tools")
            except OutputError:
                compiles = False
            with self._lock:
                _keep(self._own_forms, grammar, compiles)
        return compiles

    def _strictest(self, schemas: Sequence[Mapping[str, Any]]) -> int:
        """The first that can be enforced; the last always can."""
        if len(json.dumps(schemas[0])) > MAX_CHARS:
            return len(schemas) - 1
        for which, schema in enumerate(schemas[:-1]):
            with contextlib.suppress(OutputError):
                _compile(self._index("tools"), json.dumps({"grammars": [{"json_schema": schema}]}), "tools")
                return which
        return len(schemas) - 1

    def _mark_token(self, mark: str) -> int | None:
        ids = self._tokenizer.encode(mark, parse_special=True, add_special=False)
        is_token = len(ids) == 1 and self._tokenizer.grammar_bytes(ids[0]).startswith(b"\xff")
        return ids[0] if is_token else None

    def warm_up(self) -> None:
        """Index the vocabulary, before somebody waits for it."""
        with contextlib.suppress(OutputError):
            self._index("")

    def _index(self, field: str) -> LLTokenizer:
        with self._lock:
            if self._ll_tokenizer is None:
                self._ll_tokenizer = _index_vocabulary(self._tokenizer, field)
            return self._ll_tokenizer

    def _matcher(self, grammars: str, field: str) -> LLMatcher:
        """One to copy, from the cache or new. Order matters: properties are written in the schema's order."""
        with self._lock:
            matcher = self._cache.pop(grammars, None)
        if matcher is None:
            matcher = _compile(self._index(field), grammars, field)
        with self._lock:
            self._cache[grammars] = matcher
            while len(self._cache) > CACHED_GRAMMARS or sum(map(len, self._cache)) > CACHED_CHARS:
                if len(self._cache) == 1:
                    break
                self._cache.popitem(last=False)
        return matcher


def _keep(known: OrderedDict[str, Any], key: str, value: Any) -> None:
    known[key] = value
    while len(known) > RELAXED_TOOLS or sum(map(len, known)) > CACHED_CHARS:
        known.popitem(last=False)


def _compile(tokenizer: LLTokenizer, grammars: str, field: str) -> LLMatcher:
    """A chain of a few thousand rules, each of which names the next, would overflow a usual thread's stack,
    and end the process; MAX_CHARS of them take less than 64 MiB."""
    return on_deep_stack(lambda: _compile_here(tokenizer, grammars, field))


def _compile_here(tokenizer: LLTokenizer, grammars: str, field: str) -> LLMatcher:
    matcher = LLMatcher(tokenizer, grammars, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        # Finds what nothing can satisfy, and the first mask may take long: here it keeps no step waiting.
        matcher.compute_bitmask()
    if matcher.is_error():
        raise OutputError(f"cannot be enforced: {_one_line(matcher.get_error())}", field)
    return matcher


def _index_vocabulary(tokenizer: Tokenizer, field: str) -> LLTokenizer:
    """llguidance's view of the vocabulary, as `llguidance.llamacpp` makes it from deprecated functions."""
    try:
        return LLTokenizer.from_llamacpp(  # type: ignore[attr-defined]  # missing in its stubs
            tokens=[tokenizer.grammar_bytes(token_id) for token_id in range(tokenizer.n_vocab)],
            vocab_ptr=tokenizer.vocab_pointer,
            tokenize_fptr=ctypes.cast(llama.llama_tokenize, ctypes.c_void_p).value,
            eos_token=sorted(tokenizer.eog_ids),
            slices=LLTokenizer.json_slices(),
        )
    except ValueError as error:  # nothing in it ends a generation, for one
        raise OutputError(f"cannot be enforced with this model's vocabulary: {error}", field) from None


def _one_line(text: str) -> str:
    return " ".join(text.replace("<non-verbose/>", "").split())[:500]
