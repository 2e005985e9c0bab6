"""Texts for the store of served text, and what it proposes after them."""

from __future__ import annotations

import os

import numpy as np

from spec.base import Draft, Proposer
from spec.store import Store

VOCAB = 50_000
FULL = os.environ.get("HETERO_TEST_SCALE") == "full"


def unique(seed: int, length: int) -> list[int]:
    """Text in which no token comes twice."""
    return np.random.default_rng(seed).permutation(VOCAB)[:length].tolist()


def after(store: Store, context: list[int], max_tokens: int = 8, scope: str = "") -> Draft:
    proposer: Proposer = store.proposer(scope)
    proposer.extend(context)
    return proposer.propose(max_tokens)
