"""Fixtures of tests that write text under a grammar."""

from __future__ import annotations

from pathlib import Path

import pytest
from constrained import Writer

from hetero.text.grammar import GrammarCompiler
from hetero.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def writer(smollm2_path: Path) -> Writer:
    return Writer(Tokenizer(smollm2_path))


@pytest.fixture(scope="module")
def compiler(writer: Writer) -> GrammarCompiler:
    return GrammarCompiler(writer.tokenizer)
