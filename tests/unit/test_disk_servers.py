"""Several servers with one folder of the disk tier, and servers that are killed."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

from disk_folder_tools import Clock, files, get, key_of, open_folder, put
from scale import FULL

from hetero.kv.disk_folder import DISK_BLOCK, TOUCH_SECONDS, DiskFolder

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "unit")]


def test_two_servers_write_at_once_within_one_limit(tmp_path: Path) -> None:
    limit = 160 * DISK_BLOCK
    two = [open_folder(tmp_path, limit), open_folder(tmp_path, limit)]
    most, over = [0], []

    def work(folder: DiskFolder, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(2000 if FULL else 250):
            number = rng.randrange(300)
            if not get(folder, number):
                assert put(folder, number)
            if rng.random() < 0.2:
                most[0] = max(most[0], len(files(tmp_path)))

    def guarded(folder: DiskFolder, seed: int) -> None:
        try:
            work(folder, seed)
        except BaseException as exc:
            over.append(exc)

    threads = [threading.Thread(target=guarded, args=(f, i)) for i, f in enumerate(two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not over, over
    assert 100 < most[0] <= 160
    assert all(folder.stats.damaged == folder.stats.failed == 0 for folder in two)
    third = open_folder(tmp_path, limit)
    known = [n for n in range(300) if third.mask(key_of(n))]
    assert len(known) > 100 and all(get(third, n) for n in known)


def test_a_server_that_ended_takes_no_room(tmp_path: Path) -> None:
    first = open_folder(tmp_path, 64 * DISK_BLOCK)
    put(first, 0)
    assert len(list((tmp_path / "servers").iterdir())) == 1
    first.close()
    clock = Clock()
    clock.now = time.time()
    crashed = open_folder(tmp_path, 64 * DISK_BLOCK, clock=clock)
    put(crashed, 1)
    clock.now += 10 * TOUCH_SECONDS
    last = open_folder(tmp_path, 64 * DISK_BLOCK, clock=clock)
    for number in range(64):
        put(last, number)
    assert last.used_bytes == 64 * DISK_BLOCK
    assert len(list((tmp_path / "servers").iterdir())) == 1


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = {folders!r}
from disk_folder_tools import open_folder, put
from hetero.kv.disk_folder import DISK_BLOCK
folder = open_folder(Path({path!r}), 40 * DISK_BLOCK)
number = {start}
while True:
    put(folder, number, 1 + number % 3)
    number += 1
    if number == {start} + 3:
        print("ready", flush=True)
"""


def test_kill_9_at_any_moment(tmp_path: Path) -> None:
    """A process that writes as fast as it can is killed, over and over, in one folder."""
    rng = random.Random(3)
    seen = 0
    for kill in range(300 if FULL else 6):
        start = rng.randrange(1000)
        code = WRITER.format(folders=FOLDERS, path=str(tmp_path), start=start)
        child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(rng.random() * 0.04)
        child.kill()
        child.wait()
        child.stdout.close()
        folder = open_folder(tmp_path, 40 * DISK_BLOCK)
        assert not any((tmp_path / "parts").iterdir()), "left behind"
        known = [n for n in range(1, 5000) if folder.mask(key_of(n))] if kill % 10 == 0 else []
        known += [n for n in range(start, start + 400) if folder.mask(key_of(n))]
        assert all(get(folder, n) for n in known)
        assert folder.stats.damaged == 0 and len(files(tmp_path)) <= 40
        folder.check_invariants()
        seen += len(known)
    assert seen > 5
