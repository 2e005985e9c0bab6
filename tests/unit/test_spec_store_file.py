"""The file of a store: whole, or a cold start."""

from __future__ import annotations

import logging
import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
from scale import FULL
from spec_tools import VOCAB, after, unique

from spec import store as store_module
from spec import store_file
from spec.base import Draft
from spec.store import Store
from spec.store_file import Content
from spec.store_kernels import TOKEN_BITS


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, list[list[int]]]:
    path, texts = tmp_path / "spec" / "tokens.store", [unique(seed, 300) for seed in range(70, 80)]
    store = Store(VOCAB, 8192, path, b"tokenizer")
    for i, text in enumerate(texts):
        store.learn(text, "key" if i % 2 else "")
    store.learn([*texts[0][:100], 1, 2, 3, *texts[0][103:]])
    store.close()
    return path, texts


@pytest.mark.parametrize("capacity", [8192, 4096, 2048])
def test_saved_and_restored_whole(saved: tuple[Path, list[list[int]]], capacity: int):
    path, texts = saved
    store = Store(VOCAB, capacity, path, b"tokenizer")
    store.check_invariants()
    for i, text in enumerate(texts):
        if sum(map(len, texts[i:])) + 100 < capacity:  # a smaller store keeps the newest
            scope = "key" if i % 2 else ""
            assert all(after(store, text[:n], 5, scope).token_ids == text[n : n + 5] for n in (110, 200))
            assert after(store, text[:200], 5, "" if i % 2 else "key").match_length == 0
    if capacity == 8192:
        assert after(store, texts[0][:100], 3).token_ids == [1, 2, 3]
    store.learn_now(unique(90, 300), "another")
    store.check_invariants()


def test_a_full_ring_is_restored_whole(tmp_path: Path):
    store = Store(VOCAB, 2048, tmp_path / "a", b"t")
    texts = [unique(seed, 300) for seed in range(200, 230)]
    for text in texts:
        store.learn_now(text)
    assert store.save()
    again = Store(VOCAB, 2048, tmp_path / "a", b"t")
    again.check_invariants()
    assert abs(again.held_tokens - store.held_tokens) <= 1
    for text in texts[-5:]:
        assert after(again, text[:100], 20) == after(store, text[:100], 20) == Draft(text[100:120], 48)


def test_a_missing_file_is_an_empty_store(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert Store(VOCAB, 2048, tmp_path / "none" / "x", b"t").held_tokens == 0
    assert not caplog.records


def damaged(data: bytes) -> dict[str, bytes]:
    flips = np.random.default_rng(0).integers(0, 8 * len(data), 200 if FULL else 20).tolist()
    cases = {f"bit {bit}": flipped(data, bit) for bit in [0, 70, 200, 330, 400, 450, *flips]}
    cases |= {f"cut to {n}": data[:n] for n in (0, 7, 8, 24, 40, 55, 56, len(data) // 2, len(data) - 1)}
    return cases | {"zeros": bytes(len(data)), "longer": data + b"\0", "text": b"hetstore" * 40}


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_damaged_file_is_a_cold_start_with_one_warning(
    saved: tuple[Path, list[list[int]]], caplog: pytest.LogCaptureFixture
):
    path, texts = saved
    for case, data in damaged(path.read_bytes()).items():
        caplog.clear()
        path.write_bytes(data)
        store = Store(VOCAB, 2048, path, b"tokenizer")
        assert store.held_tokens == 0, case
        assert [r.levelno for r in caplog.records] == [logging.WARNING], case
        assert str(path) in caplog.text, case
    store.learn_now(texts[0])
    store.close()
    assert Store(VOCAB, 2048, path, b"tokenizer").held_tokens == 300


def test_a_scope_that_is_there_twice_is_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    content = Content(["a", "a"], np.zeros(1, np.int32), np.zeros(1, np.uint8))
    store_file.write(tmp_path / "x", b"t", content)  # two clients would then share a number
    assert store_file.read(tmp_path / "x", b"t", VOCAB) is None
    assert "a scope is there twice" in caplog.text


@pytest.mark.skipif(os.name == "nt", reason="a folder's rights decide there")
def test_nobody_else_can_read_it(saved: tuple[Path, list[list[int]]]):
    path, texts = saved
    path.chmod(0o644)  # as an older one may be
    store = Store(VOCAB, 8192, path, b"tokenizer")
    store.learn_now([*texts[0], *texts[1]])
    assert store.save() and stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(("fingerprint", "vocab"), [(b"another", VOCAB), (b"tokenizer", 1000)])
def test_another_tokenizers_file_is_a_cold_start(
    saved: tuple[Path, list[list[int]]], fingerprint: bytes, vocab: int, caplog: pytest.LogCaptureFixture
):
    assert Store(vocab, 2048, saved[0], fingerprint).held_tokens == 0
    assert len(caplog.records) == 1


def test_a_folder_in_its_place_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    store = Store(VOCAB, 2048, tmp_path, b"t")
    store.learn_now(unique(91, 100))
    assert not store.save() and len(caplog.records) == 2
    assert [p for p in tmp_path.parent.iterdir() if p.name.endswith(".tmp")] == []


def test_a_failed_save_leaves_the_file_as_it_was(
    saved: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    path, _ = saved
    before = path.read_bytes()
    store = Store(VOCAB, 8192, path, b"tokenizer")
    store.learn_now(unique(92, 300))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not store.save() and "No space left" in caplog.text
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == [path.name]
    monkeypatch.undo()
    assert store.save() and path.read_bytes() != before


def test_saved_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_module, "SAVE_SECONDS", 0.02)
    path = tmp_path / "x"
    store = Store(VOCAB, 2048, path, b"t")
    store.learn(unique(93, 300))
    for _ in range(500):
        if path.exists():
            break
        threading.Event().wait(0.02)
    assert Store(VOCAB, 2048, path, b"t").held_tokens == 300
    store.close()


def test_what_a_killed_program_left_is_removed(tmp_path: Path):
    path, left, others = tmp_path / "[x]", tmp_path / "[x].1234abcd.tmp", tmp_path / "y.tmp"
    for file in (left, others):
        file.write_bytes(b"half")
        os.utime(file, (1, 1))
    store = Store(VOCAB, 2048, path, b"t")
    store.learn_now(unique(94, 100))
    store.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["[x]", "y.tmp"]


@pytest.mark.parametrize(
    ("word", "good"), [(VOCAB, True), (VOCAB + 1, False), ((1 << TOKEN_BITS) + 1, False), (-1, False)]
)
def test_tokens_and_scopes_that_cannot_be_are_damage(tmp_path: Path, word: int, good: bool):
    content = Content(["a"], np.array([word], np.int32), np.zeros(1, np.uint8))
    store_file.write(tmp_path / "x", b"t", content)
    assert (store_file.read(tmp_path / "x", b"t", VOCAB) is not None) == good
