"""How much host memory the KV cache gets beside the devices' pools."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from fake_stage import GIB, cpu, gpu
from test_plan_model import FP8, Planner
from tiny_models import tiny_model

from backends.host_memory import slot_sizes
from hetero.config import SettingError, load
from hetero.launch import _stage_specs
from hetero.plan.host_memory import WRITTEN_BEHIND, HostPlan, plan_host
from hetero.prepare import LaunchError, require_fit
from hetero.settings import OFF


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    folder: Path = tmp_path_factory.mktemp("windows")
    return Planner(tiny_model(folder / "m.gguf", "gemma3", n_layers=7, n_heads=4, n_kv_heads=2, head_dim=64))


def host_plan(planner: Planner, choices: list, ram: int, free: int = 16 * GIB, **given) -> HostPlan:
    made = planner.plan(choices, kv_tokens=2048, measure="guessed", **given)
    return plan_host(ram, made.facts, made.plan, choices, free)


def test_sizes_are_those_of_the_stages(planner: Planner) -> None:
    choices = [cpu("CPU"), gpu("CUDA0")]
    made = planner.prepared(choices, device=("CPU", "CUDA0"), kv_tokens=2048, kv_type=FP8, measure="guessed")
    specs = _stage_specs(made, planner.settings, 2)
    assert len(made.host.slots) == 2 and all(made.host.slots)
    assert all(spec.host_slots == made.host.slots for spec in specs)
    stages = [slot_sizes(planner.config, spec) for spec in specs]
    assert made.host.block_bytes == tuple(map(sum, zip(*stages, strict=True)))


def test_a_size_is_split_like_the_pools_and_kept(planner: Planner) -> None:
    host = host_plan(planner, [cpu("CPU")], 64 << 20)
    made = planner.plan([cpu("CPU")], kv_tokens=2048).plan
    assert 0.98 * (64 << 20) < host.nbytes <= 64 << 20
    shares = [slots / group.num_blocks for slots, group in zip(host.slots, made.groups, strict=True)]
    assert shares[0] == pytest.approx(shares[1], rel=0.02) and host.tokens == 16 * host.slots[0]


def test_what_is_decided(planner: Planner) -> None:
    assert host_plan(planner, [cpu("CPU")], 0).nbytes == 0, "its pools are main memory already"
    decided = host_plan(planner, [gpu("CUDA0")], 0, free=GIB)
    assert 0.24 * GIB < decided.nbytes <= GIB // 4
    assert host_plan(planner, [gpu("CUDA0")], OFF).nbytes == 0
    both = [gpu("CUDA0"), cpu("CPU")]
    assert host_plan(planner, both, 0, device=("CUDA0", "CPU")).nbytes > 0
    far = dataclasses.replace(both[1].spec, worker="box:8090")  # refuses what its machine has no room for
    both[1] = dataclasses.replace(both[1], spec=far)
    assert host_plan(planner, both, 0, device=("CUDA0", "CPU")).nbytes == 0
    assert host_plan(planner, both, 1 << 20, device=("CUDA0", "CPU")).nbytes > 0, "asked for"


def test_a_disk_gets_slots_for_a_context_as_far_as_memory_is_left(planner: Planner) -> None:
    choices = [cpu("CPU")]
    made = planner.plan(choices, kv_tokens=2048, measure="guessed")
    held = made.plan.total_bytes

    def slots(left: int, ram: int = OFF) -> tuple[int, ...]:
        return plan_host(ram, made.facts, made.plan, choices, held + left, disk=True).slots

    whole = slots(16 * GIB)
    longest = -(-made.plan.max_model_len // 16)
    blocks = [group.num_blocks for group in made.plan.groups]
    assert whole == slots(16 * GIB, 0) == tuple(min(n, longest) + WRITTEN_BEHIND for n in blocks)
    sizes = plan_host(OFF, made.facts, made.plan, choices, GIB).block_bytes
    some = sum(n * size for n, size in zip(whole, sizes, strict=True)) * 9 // 10
    assert sum(n * size for n, size in zip(slots(some), sizes, strict=True)) < some
    assert slots(0) == (WRITTEN_BEHIND,) * len(whole), "else nothing could be written"


def test_what_is_not_there_is_refused_in_one_line(planner: Planner) -> None:
    short = host_plan(planner, [gpu("CUDA0")], 2 * GIB, free=GIB)
    assert short.short_by == 2 * GIB - int(0.9 * GIB)
    made = planner.prepared([gpu("CUDA0")], kv_tokens=2048)
    require_fit(made)
    with pytest.raises(LaunchError, match=r"^--ram-cache: 2.0 GiB .* 1.1 GiB more .*lower it") as refused:
        require_fit(dataclasses.replace(made, host=short))
    assert "\n" not in str(refused.value)


def test_the_setting() -> None:
    assert load({"ram_cache": "off"}, {}).settings.ram_cache == OFF
    assert load({}, {"HETERO_RAM_CACHE": "2GiB"}).settings.ram_cache == 2 * GIB
    with pytest.raises(SettingError, match="--ram-cache: 'lots' is not a size"):
        load({"ram_cache": "lots"}, {})
    with pytest.raises(SettingError, match="--kv-memory: 'off' is not a size"):
        load({"kv_memory": "off"}, {})
    with pytest.raises(SettingError, match="--cache-scope: 'user' is not one of shared, key"):
        load({"cache_scope": "user"}, {})
