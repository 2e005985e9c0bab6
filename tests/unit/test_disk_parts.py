"""Files that are being written to a disk cache which several machines or containers share."""

from __future__ import annotations

import os
import time
from pathlib import Path

from disk_folder_tools import content, get, key_of, open_folder, put

from hetero.kv.disk_folder import PART_SECONDS


def test_a_part_that_is_taken_for_a_dead_ones_costs_one_entry(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)

    def removed() -> bool:
        (part,) = (tmp_path / "parts").iterdir()
        part.unlink()
        return True

    assert not folder.put(key_of(0), 1, content(0, 1), removed)
    assert not folder.is_paused and folder.stats.failed == 0
    assert put(folder, 0) and get(folder, 0)
    folder.check_invariants()


def test_an_old_part_goes_though_its_process_seems_to_live(tmp_path: Path) -> None:
    open_folder(tmp_path)
    old, new = (tmp_path / "parts" / f"{os.getpid()}.{digit * 32}" for digit in "01")
    for part, age in ((old, 2 * PART_SECONDS), (new, 0)):
        part.touch()
        os.utime(part, (time.time() - age,) * 2)
    open_folder(tmp_path)
    assert not old.exists() and new.exists()
