"""What a model with random logits writes under a grammar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetero.text.grammar import Grammar
from hetero.text.tokenizer import Tokenizer


class Writer:
    """Writes at random, few blanks, and sees to it that an answer ends: closes what is open, when it can."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        texts = [tokenizer.token_bytes(i) for i in range(tokenizer.n_vocab)]
        self._closes = np.array([len(text) < 4 and any(char in b'"}]<' for char in text) for text in texts])
        self._blank = np.array([bool(text) and not text.strip() for text in texts])
        self._ends = np.zeros(tokenizer.n_vocab, bool)
        self._ends[list(tokenizer.eog_ids)] = True

    def write(
        self,
        grammar: Grammar,
        seed: int,
        limit: int = 150,
        favour: dict[int, float] | None = None,
        closings: Sequence[str] = (),
    ):
        """(token ids, whether the answer is complete) of at most `limit` tokens; `favour` adds to logits.

        Now and then one of the `closings` is written, texts that chance does not hit upon.
        """
        tokenizer, rng = self.tokenizer, np.random.default_rng(seed)
        row = np.zeros((tokenizer.n_vocab + 31) // 32, np.int32)
        ids: list[int] = []
        closing_ids = [tokenizer.encode(text, parse_special=False, add_special=False) for text in closings]
        while not grammar.is_finished and len(ids) < limit:
            if closings and rng.random() < 0.2:
                for text_ids in closing_ids:
                    if _accepts(grammar, text_ids):
                        ids += text_ids
                        break
                continue
            grammar.fill_mask(row)
            allowed = np.unpackbits(row.view(np.uint8), bitorder="little")[: tokenizer.n_vocab].astype(bool)
            assert allowed.any()
            logits = rng.standard_normal(tokenizer.n_vocab) - 6.0 * self._blank
            logits += 8.0 * self._closes * (len(ids) > 20) + 9.0 * self._ends * (len(ids) > 5)
            for token_id, bonus in (favour or {}).items():
                logits[token_id] += bonus
            token_id = int(np.where(allowed, logits, -np.inf).argmax())
            assert grammar.accept(token_id)
            if token_id in tokenizer.eog_ids:
                return ids, True
            ids.append(token_id)
        return ids, grammar.is_finished


def _accepts(grammar: Grammar, token_ids: Sequence[int]) -> bool:
    """Whether the grammar takes all of them; then it has."""
    tried = grammar.fork()
    return all(map(tried.accept, token_ids)) and all(map(grammar.accept, token_ids))
