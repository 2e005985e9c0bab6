"""Slots in host memory: as much as was promised, no more than is used, and shared where two map the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tiny_models import tiny_model

from backends import host_memory
from backends.ggml.models.config import read_config
from backends.ggml.stage import StageSpec
from backends.host_memory import ALIGNMENT, HostMemory, slot_sizes
from hetero.pipeline import isolated, shared_memory
from hetero.pipeline.shared_memory import SharedRegion
from quant.gguf import open_gguf

SIZES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5000)), min_size=1, max_size=3)


class Slots(RuleBasedStateMachine):
    """Slots of memory of its own and of two ends that share some, against a dictionary."""

    @initialize(groups=SIZES, chunk=st.integers(1, 20_000))
    def make(self, groups: list[tuple[int, int]], chunk: int) -> None:
        self.slots, self.sizes = [n for n, _ in groups], [size for _, size in groups]
        self.chunk_bytes, host_memory.CHUNK_BYTES = host_memory.CHUNK_BYTES, chunk
        own = HostMemory(self.slots, self.sizes)
        self.region = SharedRegion(max(1, own.nbytes))
        shared = [HostMemory(self.slots, self.sizes, self.region) for _ in range(2)]
        host_memory.CHUNK_BYTES = self.chunk_bytes
        self.ends = [(own, own), (shared[0], shared[1])]
        self.content: dict[tuple[int, int], np.ndarray] = {}

    @rule(group=st.integers(0, 2), slot=st.integers(0, 39), seed=st.integers(0, 1000), end=st.booleans())
    def write(self, group: int, slot: int, seed: int, end: bool) -> None:
        if group >= len(self.slots) or slot >= self.slots[group]:
            return
        data = np.random.default_rng(seed).integers(0, 256, self.sizes[group], np.uint8)
        for pair in self.ends:
            pair[end].view(group, slot)[:] = data
        self.content[group, slot] = data

    @rule(group=st.integers(0, 2), slot=st.integers(0, 39), count=st.integers(1, 40), end=st.booleans())
    def read(self, group: int, slot: int, count: int, end: bool) -> None:
        if group >= len(self.slots) or slot + count > self.slots[group]:
            return
        for pair in self.ends:
            memory, at, size = pair[end], slot, self.sizes[group]
            while at < slot + count:
                address, n = memory.place(group, at, slot + count - at)
                assert 0 < n <= slot + count - at
                for i in range(n):
                    view = memory.view(group, at + i)
                    assert view.shape == (size,) and (not size or view.ctypes.data == address + i * size)
                    assert np.array_equal(view, self.content.get((group, at + i), np.zeros_like(view)))
                at += n

    @invariant()
    def what_is_promised(self) -> None:
        for memory in {id(m): m for pair in self.ends for m in pair}.values():
            memory.check_invariants()
            slots = sum(n * size for n, size in zip(self.slots, self.sizes, strict=True))
            chunks = sum(self.slots)  # at the most
            assert slots <= memory.nbytes <= slots + chunks * ALIGNMENT

    def teardown(self) -> None:
        for memory in {id(m): m for pair in getattr(self, "ends", []) for m in pair}.values():
            memory.close()
            assert memory.used_bytes == 0
            for group, count in enumerate(memory.slots):
                if count:
                    with pytest.raises(LookupError, match="closed"):
                        memory.view(group, 0)
        if hasattr(self, "region"):
            self.region.unlink()


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)


def test_only_what_is_used_takes_memory() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    memory = HostMemory([100_000], [1 << 16])  # 6 GiB
    memory.view(0, 5)[:] = memory.view(0, 99_999)[:] = 1
    assert memory.nbytes > 6 << 30 and memory.used_bytes <= 2 * host_memory.CHUNK_BYTES
    assert process.memory_info().rss - before < 16 << 20
    memory.close()


def test_a_region_leaves_nothing_behind() -> None:
    def descriptors() -> int:
        return sum(1 for _ in Path("/dev/fd").iterdir()) if Path("/dev/fd").exists() else 0

    before = descriptors()
    region = SharedRegion(1 << 20)
    region(100, 10)[:] = 7
    region.unlink()
    region.unlink()
    assert region(0, 1 << 20).sum() == 70, "those who have the memory keep it"
    assert descriptors() == before + 1, "the mapping has one"
    part = region(100, 3)
    region.close()
    region.close()
    assert part.tolist() == [7, 7, 7], "who has a part keeps it"
    del part
    assert descriptors() == before


def test_a_region_with_a_name_as_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "NAMELESS", False)
    region = SharedRegion(100_000)
    kind, arguments = region.__reduce__()
    there = kind(*arguments)
    region.unlink()
    there(5_000, 3)[:] = 9
    assert region(0, 100_000).sum() == 27 == region(5_000, 3).sum()
    there.close()
    region.close()
    with pytest.raises(FileNotFoundError):
        kind(*arguments)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"n_layers": 4, "sliding_window": 24, "sliding_window_pattern": 4}
    return tiny_model(tmp_path_factory.mktemp("host") / "tiny.gguf", arch="gemma3", **shape)


def test_sizes_of_slots(model: Path) -> None:
    config = read_config(open_gguf(model))
    windows = [w is not None for w in config.layer_windows]
    spec = StageSpec(0, 4, {i: int(w) for i, w in enumerate(windows)}, (9, 9), 8, 8, host_slots=(3, 3))
    block = 16 * config.n_head_kv * 2 * (config.head_dim_k + config.head_dim_v)
    assert slot_sizes(config, spec) == (block, 3 * block)
    part = StageSpec(0, 2, {i: int(w) for i, w in enumerate(windows)}, (9, 9), 8, 8, host_slots=(3, 3))
    assert slot_sizes(config, part) == (0, 2 * block)
    bytewise = StageSpec(0, 4, spec.group_of, (9, 9), 8, 8, key_type="fp8", value_type="f16")
    per_token = config.head_dim_k + 2 + 2 * config.head_dim_v
    assert slot_sizes(config, bytewise)[0] == 16 * config.n_head_kv * per_token


def test_where_nothing_can_be_shared(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = read_config(open_gguf(model))
    spec = StageSpec(0, 4, dict.fromkeys(range(4), 0), (9,), 8, 8, host_slots=(3,))
    host, region = isolated._shared_host(config, spec)
    assert host is not None and region is not None and host.nbytes >= 3 * host.slot_bytes(0)
    region.unlink()

    other = StageSpec(0, 4, dict.fromkeys(range(4), 1), (9, 9), 8, 8, host_slots=(3, 0))
    nothing, region = isolated._shared_host(config, other)
    assert nothing is not None and nothing.nbytes == 0 and region is None, "there is nothing to share"

    def refuse(nbytes: int) -> SharedRegion:
        raise OSError("no memory")

    monkeypatch.setattr(isolated, "SharedRegion", refuse)
    assert isolated._shared_host(config, spec) == (None, None)
    assert "no memory" in caplog.text
