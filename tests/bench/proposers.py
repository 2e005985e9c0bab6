"""What drafts cost and how often they are right, without a model.

    python -m tests.bench.proposers [--tokens 10000000]

Text is this repository's Python source, cut into word pieces; the large store is filled with random tokens,
the hardest for caches. Right drafts are counted by replaying a file token by token.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from spec.base import Proposer
from spec.ngram import NgramProposer
from spec.store import Store

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 1 << 17
DRAFT = 8  # tokens


def sources() -> list[list[int]]:
    """Token ids of each of the repository's modules."""
    ids: dict[str, int] = {}
    files = sorted(p for name in ("hetero", "backends", "quant", "spec") for p in (ROOT / name).rglob("*.py"))
    pieces = [re.findall(r"\w{1,5}|\s+|.", path.read_text(encoding="utf-8")) for path in files]
    return [[ids.setdefault(piece, len(ids)) for piece in text] for text in pieces if len(text) > 500]


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def edited(text: Sequence[int], rng: random.Random, every: int = 60) -> list[int]:
    """The text with a token replaced in every `every`."""
    return [rng.randrange(VOCAB) if rng.randrange(every) == 0 else token for token in text]


def replay(proposers: Sequence[Proposer], text: Sequence[int]) -> float:
    """Tokens per step when each draft is verified against `text`; the longest match proposes."""
    at = steps = 0
    while at < len(text):
        drafts = [proposer.propose(DRAFT) for proposer in proposers]
        draft = max(drafts, key=lambda draft: draft.match_length).token_ids
        right = 0
        while right < len(draft) and at + right < len(text) and draft[right] == text[at + right]:
            right += 1
        for proposer in proposers:
            proposer.extend(text[at : at + right + 1])
        at, steps = at + right + 1, steps + 1
    return len(text) / steps


def bench_ngram(text: list[int]) -> None:
    tokens = np.array((text * (1 + 100_000 // len(text)))[:100_000], np.int32)
    NgramProposer([1, 1]).propose(1)
    best = min(timed(lambda: NgramProposer(tokens)) for _ in range(3))
    proposer = NgramProposer(tokens)
    size = proposer.nbytes / len(proposer)
    extend = timed(lambda: [proposer.extend([token]) for token in text[:20_000]]) / 20_000
    propose = timed(lambda: [proposer.propose(DRAFT) for _ in range(20_000)]) / 20_000
    show("ngram, index of 100,000 tokens", f"{best * 1e3:.1f} ms, {size:.0f} bytes a token")
    show(f"ngram, extend by one; propose {DRAFT}", f"{extend * 1e6:.1f} us; {propose * 1e6:.1f} us")


def bench_store(text: list[int], capacity: int) -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.store"
        store = Store(VOCAB, capacity, path, b"bench")
        parts = [rng.integers(0, VOCAB, 10_000).astype(np.int32) for _ in range(capacity // 10_000)]
        new = timed(lambda: [store.learn_now(part) for part in parts]) / capacity
        known = timed(lambda: [store.learn_now(part) for part in parts[-100:]]) / 1e6
        store.learn_now(text)
        proposer, lookups = store.proposer(), 20_000

        def ask() -> None:
            for i in range(lookups):
                proposer.extend(parts[-1 - i % 100][i % 9000 : i % 9000 + 20])
                proposer.propose(DRAFT)

        lookup = timed(ask) / lookups
        per_million = 1e6 / store.held_tokens
        save = timed(store.save) * per_million
        restore = timed(lambda: Store(VOCAB, capacity, path, b"bench")) * per_million
        show("store, learn a token: new; known", f"{new * 1e6:.2f} us; {known * 1e6:.2f} us")
        show(f"store, extend by 20 and propose {DRAFT}", f"{lookup * 1e6:.1f} us")
        show("store, size", f"{store.nbytes / capacity:.0f} bytes a token, {capacity:,} tokens")
        show("store, a million tokens: save; restore", f"{save:.2f} s; {restore:.2f} s")


def bench_right(texts: list[list[int]]) -> None:
    cold, warm = [], []
    rng = random.Random(0)
    store = Store(VOCAB, 1_000_000)
    for text in texts:
        store.learn_now(text)
    for text in texts[:: max(1, len(texts) // 12)]:
        version = edited(text, rng)
        cold.append(replay([NgramProposer()], version))
        warm.append(replay([NgramProposer(), store.proposer()], version))
    show(
        "files edited in 1 token of 60, tokens a step", f"cold {np.mean(cold):.2f}, warm {np.mean(warm):.2f}"
    )


def show(what: str, measured: str) -> None:
    print(f"{what:46}{measured}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=10_000_000, help="capacity of the store")
    options = parser.parse_args()
    texts = sources()
    bench_ngram([token for text in texts for token in text])
    bench_store(texts[0], options.tokens)
    bench_right(texts)


if __name__ == "__main__":
    main()
