"""Text to token ids and back, with libllama's own tokenizers: exact for every GGUF it can read."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llama_cpp.llama_cpp as llama

from hetero.text.patterns import any_of, separable
from hetero.text.vocabulary import AGAIN, check_vocabulary
from quant.gguf import open_gguf

Segment = tuple[str, bool]  # text, and whether control tokens in it are parsed

_MORE_ENDS = ("▁<EOT>",)  # of a generation, beside those that libllama knows: Code Llama, after filling in
LONG_TEXT = 2048  # characters from which it pays not to leave the search for special tokens to libllama
_SPM, _BPE, _WPM = 1, 2, 3  # LLAMA_VOCAB_TYPE_*
_LOG_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_errors: deque[str] = deque(maxlen=8)


@llama.llama_log_callback
def _log(level, text, user_data):
    if level == _LOG_ERROR:
        _errors.append(text.decode("utf-8", "replace").strip())


class Tokenizer:
    """The vocabulary of a GGUF file. No weights are read.

    Ids are 0 to `n_vocab` - 1. `bos_id` and `eos_id` are None where the model has none; `eog_ids` end a
    generation; `control_ids` are written by templates, never by text; `add_bos` says whether prompts
    start with BOS. Encoding and decoding are safe from several threads at once.
    """

    def __init__(self, path: str | os.PathLike):
        """Load the vocabulary of the GGUF file at `path`; ValueError (one line) if there is none."""
        self.path = Path(path)
        # libllama aborts the process on some malformed files: look first.
        with open_gguf(self.path) as gguf:
            check_vocabulary(self.path, gguf.metadata)
            head = gguf.metadata_bytes() if gguf.is_inside else None
        self._model = _load_vocab(self.path) if head is None else _load_vocab_of(self.path, head)
        self.vocab_pointer: int = llama.llama_model_get_vocab(self._model)
        vocab = self.vocab_pointer
        self.n_vocab: int = llama.llama_vocab_n_tokens(vocab)
        if self.n_vocab == 0:
            raise ValueError(f"{self.path}: the file has no vocabulary")
        self.bos_id = self._id_or_none(llama.llama_vocab_bos(vocab))
        self.eos_id = self._id_or_none(llama.llama_vocab_eos(vocab))
        self.add_bos = self._adds("bos", llama.llama_vocab_get_add_bos(vocab), self.bos_id)
        self.add_eos = self._adds("eos", llama.llama_vocab_get_add_eos(vocab), self.eos_id)
        if llama.llama_vocab_type(vocab) == _WPM:  # writes these around every text, and aborts without
            self._adds("bos", True, self.bos_id)
            self._adds("seperator", True, self._id_or_none(llama.llama_vocab_sep(vocab)))
        ids = range(self.n_vocab)
        special = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_UNKNOWN
        self.eog_ids = frozenset(i for i in ids if llama.llama_vocab_is_eog(vocab, i))
        self.control_ids = frozenset(i for i in ids if self._attr(i) & special)
        self._bytes: list[bytes | None] = [None] * self.n_vocab
        self._control_texts = {self.token_text(i): i for i in sorted(self.control_ids)}
        self._control_texts.pop("", None)
        self.eog_ids |= {self._control_texts[t] for t in _MORE_ENDS if t in self._control_texts}

    def __del__(self) -> None:
        model = getattr(self, "_model", None)
        if model and llama is not None:
            llama.llama_model_free(model)

    def _adds(self, which: str, wanted: bool, token_id: int | None) -> bool:
        """`wanted`. ValueError when there is no such token: libllama aborts where it has to write it."""
        if wanted and token_id is None:
            key = f"tokenizer.ggml.{which}_token_id"
            raise ValueError(
                f"{self.path}: {key} is missing, and texts begin or end with that token; {AGAIN}"
            )
        return wanted

    def _id_or_none(self, token_id: int) -> int | None:
        return token_id if 0 <= token_id < self.n_vocab else None

    def _attr(self, token_id: int) -> int:
        return llama.llama_vocab_get_attr(self.vocab_pointer, token_id)

    @property
    def control_texts(self) -> Mapping[str, int]:
        """The text of every control token, with its id."""
        return self._control_texts

    @functools.cached_property
    def control_pattern(self) -> re.Pattern:
        """Matches the text of any control token, the longest where several match, as group 1."""
        return any_of(self._control_texts)

    @functools.cached_property
    def _user_defined(self) -> tuple[re.Pattern, dict[str, int]] | None:
        """Tokens that libllama cuts out of any text before its algorithm proper, if we may do that for it.

        libllama's own cutting takes quadratic time. Cutting from left to right gives the same only where
        no two such tokens can overlap.
        """
        ids = [
            i
            for i in range(self.n_vocab)
            if self._attr(i) & llama.LLAMA_TOKEN_ATTR_USER_DEFINED and i not in self.control_ids
        ]
        texts = {self.token_text(i): i for i in ids}
        strips = llama.LLAMA_TOKEN_ATTR_LSTRIP | llama.LLAMA_TOKEN_ATTR_RSTRIP
        known = llama.llama_vocab_type(self.vocab_pointer) in (_SPM, _BPE)
        if not known or any(self._attr(i) & strips for i in ids):
            return None
        if not separable({*texts, *self._control_texts}):
            return None
        return any_of(texts), texts

    def encode(self, text: str, *, parse_special: bool, add_special: bool) -> list[int]:
        """Token ids of `text`.

        `parse_special` turns the text of control tokens into those tokens; `add_special` adds BOS and
        EOS where the model wants them. Lone surrogates become "?".
        """
        if len(text) < LONG_TEXT or self._user_defined is None:
            return self._encode(text, parse_special, add_special)
        return self._encode_parts([(text, parse_special)], add_special and self.add_bos, add_special)

    def _encode(self, text: str, parse_special: bool, add_special: bool) -> list[int]:
        raw = text.encode("utf-8", "replace")
        capacity = len(raw) + 16
        while True:
            buffer = (llama.llama_token * capacity)()
            count = llama.llama_tokenize(
                self.vocab_pointer, raw, len(raw), buffer, capacity, add_special, parse_special
            )
            if count >= 0:
                return buffer[:count]
            if -count <= capacity:
                raise ValueError(f"a text of {len(raw)} bytes cannot be tokenized")
            capacity = -count

    def encode_segments(self, segments: Sequence[Segment], *, add_special: bool) -> list[int]:
        """Token ids of the joined texts, where control tokens are parsed only inside a True segment.

        Text between two control tokens is encoded in one go, whatever segments it spans, so a border
        between segments leaves no trace in the ids: only a control token cannot lie across it.
        `add_special` adds no second BOS to a prompt that writes its own.
        """
        segments = [segment for segment in segments if segment[0]]
        add_bos = self.add_bos
        if segments and segments[0][1] and self.bos_id is not None:
            add_bos = add_bos and not segments[0][0].startswith(self.token_text(self.bos_id))
        if len(segments) == 1 and add_bos == self.add_bos:
            text, parse = segments[0]
            return self.encode(text, parse_special=parse, add_special=add_special)
        return self._encode_parts(segments, add_special and add_bos, add_special)

    def _encode_parts(self, segments: Sequence[Segment], add_bos: bool, add_special: bool) -> list[int]:
        """`encode_segments`, with the control tokens found here instead of by libllama."""
        ids = [self.bos_id] if add_bos and self.bos_id is not None else []
        plain: list[str] = []
        strip_left = False

        def flush(strip_right: bool) -> None:
            text = "".join(plain)
            plain.clear()
            text = text.lstrip() if strip_left else text
            text = text.rstrip() if strip_right else text
            ids.extend(self._encode_plain(text))

        for text, parse in segments:
            # The pattern's one group puts the control tokens at the odd places.
            for index, part in enumerate(self.control_pattern.split(text) if parse else [text]):
                if index % 2 == 0:
                    plain.append(part)
                    continue
                token_id = self._control_texts[part]
                flush(bool(self._attr(token_id) & llama.LLAMA_TOKEN_ATTR_LSTRIP))
                ids.append(token_id)
                strip_left = bool(self._attr(token_id) & llama.LLAMA_TOKEN_ATTR_RSTRIP)
        flush(False)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """Text without control tokens."""
        if len(text) < LONG_TEXT or self._user_defined is None:
            return self._encode(text, False, False) if text else []
        pattern, known = self._user_defined
        ids: list[int] = []
        for index, part in enumerate(pattern.split(text)):
            if index % 2:
                ids.append(known[part])
            elif part:
                ids.extend(self._encode(part, False, False))
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text, which may be part of a character; b"" for control tokens."""
        piece = self._bytes[token_id]
        if piece is None:
            piece = self._bytes[token_id] = self._piece(token_id, special=False)
        return piece

    def token_text(self, token_id: int) -> str:
        """The token for the eyes of a reader: control tokens by name, broken UTF-8 as U+FFFD."""
        return self._piece(token_id, special=True).decode("utf-8", "replace")

    def grammar_bytes(self, token_id: int) -> bytes:
        """`token_bytes` for llguidance: what is not text, in any grammar, begins with the byte 0xff."""
        piece = self._piece(token_id, special=True)
        attr = self._attr(token_id)
        tag = attr & llama.LLAMA_TOKEN_ATTR_USER_DEFINED and piece.startswith(b"<") and piece.endswith(b">")
        return b"\xff" + piece if tag or attr & llama.LLAMA_TOKEN_ATTR_CONTROL else piece

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text that generating these ids gives: control tokens add nothing, broken UTF-8 is U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def _piece(self, token_id: int, *, special: bool) -> bytes:
        if not 0 <= token_id < self.n_vocab:
            raise IndexError(f"token id {token_id} is outside the vocabulary of {self.n_vocab}")
        capacity = 64
        while True:
            buffer = ctypes.create_string_buffer(capacity)
            count = llama.llama_token_to_piece(self.vocab_pointer, token_id, buffer, capacity, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            capacity = -count


def _load_vocab_of(path: Path, head: bytes) -> int:
    """The same for a model inside another file, which libllama cannot read: from its metadata."""
    with tempfile.TemporaryDirectory(prefix="hetero-vocab-") as folder:
        file = Path(folder, "vocab.gguf")
        file.write_bytes(head)
        return _load_vocab(file, path)


def _load_vocab(path: Path, called: Path | None = None) -> int:
    """libllama's model pointer for the vocabulary alone; errors call the file by its other name."""
    llama.llama_log_set(_log, ctypes.c_void_p(0))
    llama.llama_backend_init()
    params = llama.llama_model_default_params()
    params.vocab_only = True
    params.n_gpu_layers = 0
    params.use_extra_bufts = False
    _errors.clear()
    # Not in the main thread: what it logs is heard in Python, and a Ctrl-C that came in there would be lost.
    with ThreadPoolExecutor(1) as aside:
        model = aside.submit(llama.llama_model_load_from_file, os.fsencode(path), params).result()
    if not model:
        reason = " ".join(_errors[0].split(": ", 1)[-1].split()) if _errors else "libllama gave no reason"
        raise ValueError(f"{called or path}: the vocabulary cannot be loaded: {reason}; {AGAIN}")
    return model
