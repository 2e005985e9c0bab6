"""The files of the disk tier are never believed when something happened to them, and a disk may be full."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from disk_folder_tools import LARGE, MODEL, OTHER, Clock, file_of, get, key_of, open_folder, put
from scale import FULL

from hetero.kv import disk_folder
from hetero.kv.disk_entry import HEADER_BYTES, VERSION
from hetero.kv.disk_folder import DISK_BLOCK, PAUSE_SECONDS, DiskFolder


def test_flipped_bits_are_misses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(1)
    folder = open_folder(tmp_path)
    put(folder, 0)
    put(folder, 1)
    path = file_of(tmp_path, 0)
    good = path.read_bytes()
    at = list(range(8 * HEADER_BYTES)) if FULL else rng.sample(range(8 * HEADER_BYTES), 60)
    at += rng.sample(range(8 * HEADER_BYTES, 8 * len(good)), 1000 if FULL else 140)
    for bit in at:
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        assert folder.mask(key_of(0)) and not get(folder, 0), f"bit {bit}"
        assert not path.exists() and not folder.mask(key_of(0)), "it stays"
        path.write_bytes(good)
        folder.scan()
    assert get(folder, 0) and get(folder, 1)
    assert folder.stats.damaged == len(at)
    assert len(caplog.records) == 1, "one warning, not one for each"
    folder.check_invariants()


def damages(good: bytes, foreign: dict[str, bytes]) -> dict[str, bytes]:
    whole = len(good)
    found = {
        "empty": b"",
        "zeroed": bytes(whole),
        "zeroed at the end": good[:-256] + bytes(256),
        "zeroed at the start": bytes(HEADER_BYTES) + good[HEADER_BYTES:],
        "longer": good + b"\0",
        "random": random.Random(2).randbytes(whole),
        "twice": good * 2,
        "next version": good[:8] + (VERSION + 1).to_bytes(4, "little") + good[12:],
    }
    cuts = [1, 8, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, whole // 2, whole - 1]
    found |= {f"cut at {cut}": good[:cut] for cut in cuts}
    return found | foreign


def test_damaged_and_foreign_files_are_misses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    other = open_folder(tmp_path, model=OTHER)
    put(other, 0)
    folder = open_folder(tmp_path, clock=clock)
    for number in range(3):
        put(folder, number)
    path = file_of(tmp_path, 0)
    good = path.read_bytes()
    foreign = {
        "of another model": file_of(tmp_path, 0, OTHER).read_bytes(),
        "of other tokens": file_of(tmp_path, 1).read_bytes(),
    }
    for what, bad in damages(good, foreign).items():
        clock.now += 2 * disk_folder.WARN_SECONDS
        caplog.clear()
        path.write_bytes(bad)
        fresh = open_folder(tmp_path, clock=clock)
        assert fresh.mask(key_of(0)), what
        assert not get(fresh, 0), what
        assert not path.exists() and len(caplog.records) == 1 and str(path) in caplog.text, what
        assert get(fresh, 1) and get(fresh, 2), what
        fresh.check_invariants()
        assert put(fresh, 0) and get(fresh, 0), what
    assert get(other, 0), "another model's entry was harmed"


def test_what_is_not_an_entry_is_left_alone(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, 4 * DISK_BLOCK)
    put(folder, 0)
    folder.close()
    shard = file_of(tmp_path, 0).parent
    strangers = [tmp_path / "notes.txt", shard / "readme", shard / f"{'0' * 32}.zz", tmp_path / "parts" / "x"]
    strangers += [shard / f"{'f' * 32}.1"]  # its name belongs elsewhere
    for path in strangers:
        path.write_bytes(b"mine")
    (shard / f"{shard.name}{'0' * 30}.1").mkdir()
    if sys.platform != "win32":
        (shard / f"{shard.name}{'1' * 30}.1").symlink_to(tmp_path / "notes.txt")
    again = open_folder(tmp_path, 4 * DISK_BLOCK)
    for number in range(1, 9):
        assert put(again, number)
    assert again.used_bytes == 4 * DISK_BLOCK
    assert all(path.read_bytes() == b"mine" for path in strangers)


def test_a_folder_that_is_removed_under_it_comes_back(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "cache")
    put(folder, 0)
    shutil.rmtree(tmp_path / "cache")
    assert not get(folder, 0)
    assert put(folder, 1) and get(folder, 1)


def test_an_unusable_folder_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        DiskFolder(tmp_path / "file", LARGE, MODEL)


# -- a full disk -------------------------------------------------------------------------------------


def test_a_full_disk_stops_writing_for_a_while(tmp_path: Path, monkeypatch, caplog) -> None:
    clock = Clock()
    folder = open_folder(tmp_path, clock=clock)
    put(folder, 0)
    write = disk_folder.write_entry
    tried = []

    def full(path: Path, *args) -> int:
        tried.append(path)
        path.write_bytes(b"heteroKV as far as it went")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_folder, "write_entry", full)
    assert not put(folder, 1) and not put(folder, 2) and len(tried) == 1
    assert folder.is_paused and get(folder, 0), "reading goes on"
    clock.now += PAUSE_SECONDS
    assert not folder.is_paused and not put(folder, 3) and len(tried) == 2
    assert not any((tmp_path / "parts").iterdir())
    monkeypatch.setattr(disk_folder, "write_entry", write)
    assert not put(folder, 4)
    clock.now += PAUSE_SECONDS
    assert put(folder, 4) and get(folder, 4)
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == 2 and all("No space left" in w for w in warnings), warnings
    assert folder.stats.failed == 2
    folder.check_invariants()


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root mounts a small disk")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        folder = open_folder(tmp_path)
        stored = [number for number in range(100) if put(folder, number)]
        assert 5 < len(stored) < 100 and folder.is_paused
        assert all(get(folder, number) for number in stored)
        assert not any((tmp_path / "parts").iterdir())
        again = open_folder(tmp_path)
        assert again.num_entries == len(stored) and all(get(again, number) for number in stored)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
