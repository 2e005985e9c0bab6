"""Speculation as the settings ask for it: its proposers, the store's file, the corpus that fills it."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from hetero.request import Request
from hetero.settings import Settings
from hetero.speculation import Speculation
from quant.gguf import GGUFFile
from spec.base import Proposer
from spec.ngram import NgramProposer, compile_kernels
from spec.store import BYTES_PER_TOKEN, Store

log = logging.getLogger(__name__)

LARGEST_FILE = 1 << 20  # bytes; what is larger was not written by hand
_SKIPPED = frozenset({"node_modules", "__pycache__", "venv"})


class ProposersError(ValueError):
    """A setting of speculation that cannot be used: one line."""


class EncoderLike(Protocol):
    def encode(self, text: str, *, parse_special: bool, add_special: bool) -> list[int]: ...


class NgramSpeculation(Speculation):
    """Guesses from a request's own text."""

    def __init__(self, max_tokens: int, few_shapes: bool = False):
        compile_kernels()
        super().__init__(("ngram",), lambda request: (NgramProposer(),), max_tokens, few_shapes)


class StoreSpeculation(Speculation):
    """Guesses from a request's own text and from what was served before, which it learns."""

    def __init__(self, store: Store, max_tokens: int, by_client: bool = False, few_shapes: bool = False):
        """`by_client`: each client's requests see only what was served to the same client."""
        compile_kernels()
        super().__init__(("ngram", "store"), self._make, max_tokens, few_shapes)
        self.store = store
        self._by_client = by_client
        self._seeding: threading.Thread | None = None
        self._closing = threading.Event()

    def _make(self, request: Request) -> Sequence[Proposer]:
        return NgramProposer(), self.store.proposer(self._scope(request))

    def _scope(self, request: Request) -> str:
        return request.client if self._by_client else ""

    def remove(self, request: Request) -> None:
        super().remove(request)
        if request.output_token_ids:
            self.store.learn(request.token_ids(0, request.num_tokens), self._scope(request))

    def seed(self, tokenizer: EncoderLike, folder: Path) -> None:
        """Learn the texts of a folder, in a thread of its own."""

        def work() -> None:
            room = self.store.capacity // 2  # the rest is for what is served
            for path in text_files(folder):
                if self._closing.is_set() or room <= 0:
                    return
                room -= self._learn_file(tokenizer, path)

        self._seeding = threading.Thread(target=work, name="spec-corpus", daemon=True)
        self._seeding.start()

    def _learn_file(self, tokenizer: EncoderLike, path: Path) -> int:
        try:
            text = path.read_bytes().decode()
            if "\0" in text:
                return 0
            ids = tokenizer.encode(text, parse_special=False, add_special=False)
            self.store.learn_now(ids)
            return len(ids)
        except (OSError, ValueError) as error:  # not text, or gone by now
            log.debug("corpus: %s: %s", path, error)
            return 0

    def close(self) -> None:
        self._closing.set()
        if self._seeding is not None:
            self._seeding.join()
        self.store.close()
        super().close()


def open_speculation(
    settings: Settings, tokenizer: EncoderLike, gguf: GGUFFile, n_vocab: int, few_shapes: bool = False
) -> Speculation | None:
    """What `--spec` asks for; None when that is nothing. `few_shapes`: see Policy. Raises ProposersError."""
    if settings.spec_ngrams == "off":
        return None
    if settings.spec_ngrams == "ngram":
        return NgramSpeculation(settings.spec_tokens, few_shapes)
    path = None if settings.spec_store is None else Path(settings.spec_store)
    if path is not None and not path.parent.is_dir():
        raise ProposersError(f"--spec-store {path}: there is no folder {path.parent}")
    if path is not None and path.is_dir():
        raise ProposersError(f"--spec-store {path}: is a folder, not a file")
    corpus = None if settings.spec_corpus is None else Path(settings.spec_corpus)
    if corpus is not None and not corpus.is_dir():
        raise ProposersError(f"--spec-corpus {corpus}: is not a folder")
    capacity = settings.spec_memory // BYTES_PER_TOKEN
    try:
        store = Store(n_vocab, capacity, path, b"" if path is None else fingerprint(gguf))
    except ValueError as error:
        raise ProposersError(f"--spec store: {error}; use --spec ngram") from None
    speculation = StoreSpeculation(store, settings.spec_tokens, settings.spec_scope == "key", few_shapes)
    if corpus is not None:
        speculation.seed(tokenizer, corpus)
    return speculation


def fingerprint(gguf: GGUFFile) -> bytes:
    """What the meaning of the model's token ids depends on: 16 bytes."""
    digest = hashlib.blake2b(digest_size=16)
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    for token in tokens if isinstance(tokens, Sequence) else ():
        digest.update(str(token).encode("utf-8", "surrogatepass") + b"\0")
    return digest.digest()


def text_files(folder: Path) -> Iterator[Path]:
    """Files in a folder and below that may be text, in a fixed order. Hidden ones are left out."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in _SKIPPED)
        for name in sorted(names):
            path = Path(root, name)
            try:
                if not name.startswith(".") and path.stat().st_size <= LARGEST_FILE:
                    yield path
            except OSError:
                continue
