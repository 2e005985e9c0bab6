"""Requests that wait for a disk: only they do, and the engine's thread sleeps meanwhile."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_runner import FakeRunner, make_engine, text_after
from simulated_below import Quiet
from test_engine_async import INFO, ByteTokenizer, Compiler, read, submit, until

from hetero.async_engine import AsyncEngine
from hetero.kv.disk_folder import DiskFolder
from hetero.kv.groups import KVGroup
from hetero.kv.manager import KVManager
from hetero.kv.open_disk import DiskCacheError, open_disk, open_folder
from hetero.request import FinishReason, Request
from hetero.settings import FolderLimit
from hetero.stats import DiskStats


class SlowDisk(Quiet):
    """Holds requests whose prompt begins with "disk" until it is told to let them go."""

    def __init__(self) -> None:
        self.waiting: dict[str, Request] = {}
        self.ready: list[Request] = []
        self.looks = 0
        self.more = 0  # steps of moves that would be of use
        self.closed = False
        self.wake: Callable[[], None] = lambda: None

    @property
    def held(self) -> list[Request]:  # type: ignore[override]
        return list(self.waiting.values())

    @property
    def has_more(self) -> bool:  # type: ignore[override]
        return self.more > 0

    def hold(self, request: Request) -> bool:
        if bytes(request.prompt_token_ids[:4]) == b"disk":
            self.waiting[request.request_id] = request
        return request.request_id in self.waiting

    def cancel(self, request_id: str) -> Request | None:
        return self.waiting.pop(request_id, None)

    def take_in(self) -> list[Request]:
        self.looks += 1
        ready, self.ready = self.ready, []
        return ready

    def let_go(self) -> None:
        self.ready += self.waiting.values()
        self.waiting.clear()
        self.wake()

    def watch(self, callback: Callable[[], None]) -> None:
        self.wake = callback

    def wait(self, timeout: float) -> None:
        self.more -= 1

    def stats(self) -> DiskStats:
        return DiskStats()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
async def served():
    runner, disk = FakeRunner(), SlowDisk()
    engine = make_engine(runner)
    engine.scheduler.kv.below = disk
    served = AsyncEngine(engine, ByteTokenizer(), None, Compiler(), INFO, False)  # type: ignore[arg-type]
    served.start()
    yield served, disk, engine
    await served.close()
    assert disk.closed and runner.closed
    engine.check_invariants()


async def test_only_the_request_itself_waits_and_the_engine_sleeps(served) -> None:
    engine, disk, _ = served
    slow = asyncio.create_task(read(submit(engine, "disk 1", "slow", max_tokens=5)))
    await until(lambda: bool(disk.held))
    assert (await read(submit(engine, "other", "quick", max_tokens=5)))[0] == text_after("other", 5)
    looks = disk.looks
    await asyncio.sleep(0.3)
    assert disk.looks - looks <= 3, "the engine does not sleep"
    assert not slow.done() and engine.stats().waiting == 1 and engine.health()[0]
    disk.let_go()
    text, last = await asyncio.wait_for(slow, 5)
    assert (text, last.finish_reason) == (text_after("disk 1", 5), FinishReason.LENGTH)


async def test_a_request_that_waits_can_be_aborted_or_drained(served) -> None:
    engine, disk, _ = served
    first, second = (submit(engine, f"disk {i}", f"r{i}", max_tokens=5) for i in range(2))
    await until(lambda: len(disk.held) == 2)
    first.abort()
    assert (await read(first))[1].finish_reason is FinishReason.ABORT
    await until(lambda: [r.request_id for r in disk.held] == ["r1"])
    closing = asyncio.create_task(engine.close(drain_seconds=5))
    await asyncio.sleep(0.05)
    assert not closing.done()
    disk.let_go()
    assert (await read(second))[0] == text_after("disk 1", 5)
    await closing


async def test_a_lost_device_ends_those_who_wait_for_the_disk_too(served) -> None:
    engine, disk, inner = served
    stream = submit(engine, "disk", "r", max_tokens=5)
    await until(lambda: bool(disk.held))
    inner.runner.unavailable = "device X was lost"
    inner.runner.changed()
    last = (await read(stream))[1]
    assert last.finish_reason is FinishReason.ERROR and last.error == "device X was lost"
    assert not disk.held
    inner.runner.back = True
    inner.runner.changed()
    await until(lambda: engine.device_lost is None)


async def test_what_should_be_kept_is_kept_before_the_end(served) -> None:
    engine, disk, _ = served
    await read(submit(engine, "other", "r", max_tokens=5))
    disk.more = 3
    await engine.close()
    assert disk.more == 0


def test_a_worker_keeps_its_contexts_out_of_reach(tmp_path) -> None:
    stage = SimpleNamespace(index=0, layers=(0, 1), kv_types="f16")
    choice = SimpleNamespace(
        spec=SimpleNamespace(worker="box:7000"), label="CPU at box:7000", own_kernels=True
    )
    prepared = SimpleNamespace(plan=SimpleNamespace(groups=(), stages=[stage]), choices=[choice])
    with pytest.raises(DiskCacheError, match=r"--disk-cache.* CPU at box:7000 .*another machine"):
        open_folder(FolderLimit(str(tmp_path / "cache"), 1 << 20), prepared)  # type: ignore[arg-type]
    assert not (tmp_path / "cache").exists()


def test_a_cache_folder_that_is_a_file_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    prepared = SimpleNamespace(
        plan=SimpleNamespace(groups=(), stages=[], max_model_len=16),
        config=SimpleNamespace(),
        host=SimpleNamespace(block_bytes=(64,)),
        gguf=SimpleNamespace(metadata={}, tensors={}, paths=[]),
    )
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DiskCacheError, match=f"--disk-cache {re.escape(str(path))}: is not a folder"):
            open_folder(FolderLimit(str(path), 1 << 20), prepared)  # type: ignore[arg-type]


def test_slots_of_a_lost_stage_are_not_read(tmp_path: Path) -> None:
    memory = SimpleNamespace(
        slot_bytes=lambda g: 8 * (g == 0), view=lambda g, slot: np.full(8, slot, np.uint8)
    )
    runner = SimpleNamespace(host_memories=[memory, memory], unavailable=None)
    kv = KVManager([KVGroup((0,), None, 9), KVGroup((1,), 16, 9)], 4)
    cache = open_disk(DiskFolder(tmp_path, 1 << 20, bytes(16)), kv, runner)  # type: ignore[arg-type]
    parts_of = cache.tier.parts_of
    assert [part.tolist() for part in parts_of(0, 3)] == [[3] * 8] * 2 and parts_of(1, 3) == []
    runner.unavailable = "gone"
    with pytest.raises(LookupError, match="gone"):
        parts_of(0, 3)
    runner.unavailable, runner.host_memories = None, [memory, None]
    with pytest.raises(LookupError, match="out of reach"):
        parts_of(0, 3)
    cache.close()
