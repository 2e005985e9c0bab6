"""Speculation as the settings ask for it."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_runner import N_VOCAB, ByteTokenizer
from gguf_tools import write_gguf

from hetero.proposers import (
    LARGEST_FILE,
    NgramSpeculation,
    ProposersError,
    StoreSpeculation,
    fingerprint,
    open_speculation,
    text_files,
)
from hetero.request import Request
from hetero.sampling.params import SamplingParams
from hetero.settings import Settings
from hetero.speculation import Speculation
from quant.gguf import GGUFFile, open_gguf
from spec.base import Draft

TEXT = "the quick brown fox jumps over the lazy dog, and then it sleeps until noon"


@pytest.fixture
def gguf(tmp_path: Path) -> GGUFFile:
    return vocabulary(tmp_path / "model.gguf", ["a", "b"])


def vocabulary(path: Path, tokens: list[str]) -> GGUFFile:
    write_gguf(path, {"general.architecture": "llama", "tokenizer.ggml.tokens": tokens}, {})
    return open_gguf(path)


def opened(gguf: GGUFFile, **settings: object) -> Speculation | None:
    wanted = dataclasses.replace(Settings(), spec_memory=1 << 20, **settings)
    return open_speculation(wanted, ByteTokenizer(), gguf, N_VOCAB)


def guess(speculation: Speculation | None, text: str) -> str:
    assert isinstance(speculation, StoreSpeculation)
    proposer = speculation.store.proposer()
    proposer.extend(list(text.encode()))
    draft: Draft = proposer.propose(16)
    return bytes(draft.token_ids).decode()


def test_kinds(gguf: GGUFFile):
    assert opened(gguf, spec="off") is None
    assert isinstance(opened(gguf, spec="ngram"), NgramSpeculation)
    assert isinstance(opened(gguf), StoreSpeculation)
    assert (Settings(spec="off").draft_rows, Settings().draft_rows) == (0, 64)


@pytest.mark.parametrize("setting", ["spec_store", "spec_corpus"])
def test_what_cannot_be_used_is_one_line(gguf: GGUFFile, tmp_path: Path, setting: str):
    with pytest.raises(ProposersError) as caught:
        opened(gguf, **{setting: str(tmp_path / "missing" / "there")})
    assert "--" + setting.replace("_", "-") in str(caught.value) and "\n" not in str(caught.value)


def test_a_store_needs_a_file(gguf: GGUFFile, tmp_path: Path):
    with pytest.raises(ProposersError, match=r"--spec-store .*: is a folder, not a file"):
        opened(gguf, spec_store=str(tmp_path))


def test_a_vocabulary_too_large_for_the_store(gguf: GGUFFile):
    with pytest.raises(ProposersError, match="--spec ngram"):
        open_speculation(Settings(), ByteTokenizer(), gguf, 1 << 21)


def test_a_corpus_is_learnt(gguf: GGUFFile, tmp_path: Path):
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "text.py").write_text(TEXT)
    (folder / "binary").write_bytes(b"\xff\xfe\0")
    speculation = opened(gguf, spec_corpus=str(folder))
    assert isinstance(speculation, StoreSpeculation) and speculation._seeding is not None
    speculation._seeding.join(30)
    assert guess(speculation, "a quick brown fox") == " jumps over the "
    speculation.close()


def test_what_was_served_is_kept_from_one_start_to_the_next(gguf: GGUFFile, tmp_path: Path):
    path = str(tmp_path / "learnt")
    first = opened(gguf, spec_store=path)
    request = Request("r", list(TEXT[:30].encode()), SamplingParams())
    assert first is not None
    first.add(request)
    request.output_token_ids += TEXT[30:].encode()
    first.remove(request)
    first.close()
    assert guess(opened(gguf, spec_store=path), "a quick brown fox") == " jumps over the "
    other = vocabulary(tmp_path / "other.gguf", ["a", "c"])
    assert fingerprint(other) != fingerprint(gguf)
    assert guess(opened(other, spec_store=path), "a quick brown fox") == ""


def test_text_files_leaves_out_what_nobody_wrote(tmp_path: Path):
    for name in ("a.py", ".git/config", "node_modules/x.js", "b/c.md", ".hidden", "large"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x" * (LARGEST_FILE + 1 if name == "large" else 1))
    found = [path.relative_to(tmp_path).as_posix() for path in text_files(tmp_path)]
    assert found == ["a.py", "b/c.md"]


COMPILED = """
import sys
from spec import automaton, ngram, store, store_kernels
ngram.compile_kernels()
store.Store(100)
kernels = {**vars(automaton), **vars(store_kernels)}
print([name for name in sys.argv[1:] if not kernels[name].overloads])
"""


def test_no_kernel_is_compiled_after_the_start():
    folder = Path(__file__).resolve().parents[2] / "spec"
    source = (folder / "store.py").read_text() + (folder / "ngram.py").read_text()
    called = set(re.findall(r"(?:kernels|automaton)\.([a-z]\w*)\(", source))
    assert {"learn", "propose", "forget", "index_all", "extend", "rehash"} <= called
    command = [sys.executable, "-c", COMPILED, *sorted(called)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"
