"""The memory map as arithmetic, and what a container's limits do to it."""

from __future__ import annotations

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model

from backends.base import DeviceInfo
from hetero.config import Settings
from hetero.launch import open_stage, prepare
from hetero.plan import devices
from hetero.plan.devices import DeviceError
from hetero.plan.planner import (
    BLOCK_SIZE,
    MIN_CONTEXT,
    SHARE,
    SPARE,
    Limits,
    ModelFacts,
    explain_shortage,
    kv_bytes,
    kv_groups,
    make_plan,
)

GIB = 1 << 30
CPU = DeviceInfo("CPU", "cpu", "a processor", 8 * GIB, 4 * GIB, "CPU", "CPU")
GPU = DeviceInfo("CUDA0", "gpu", "a card", 8 * GIB, 4 * GIB, "0000:01:00.0", "CUDA")


def facts(**changes) -> ModelFacts:
    values = {
        "n_ctx_train": 8192,
        "layer_windows": (None,) * 4,
        "kv_bytes_per_token": (1024,) * 4,
        "weight_bytes": 100 << 20,
        "compute_bytes": 10 << 20,
    }
    return ModelFacts(**{**values, **changes})


models = st.builds(
    lambda layers, n_ctx, weights, compute: ModelFacts(
        n_ctx, tuple(w for w, _ in layers), tuple(b for _, b in layers), weights, compute
    ),
    st.lists(st.tuples(st.none() | st.integers(1, 5000), st.integers(16, 1 << 16)), min_size=1, max_size=12),
    st.integers(16, 1 << 18),
    st.integers(0, 64 * GIB),
    st.integers(0, GIB),
)
limits = st.builds(
    Limits,
    ctx=st.just(0) | st.integers(1, 1 << 18),
    kv_memory=st.just(0) | st.integers(1, 64 * GIB),
    kv_tokens=st.just(0) | st.integers(1, 1 << 22),
    max_num_seqs=st.integers(1, 256),
    max_num_batched_tokens=st.integers(16, 4096),
)


@given(models, st.integers(0, 256 * GIB), limits)
def test_every_plan_is_consistent(model: ModelFacts, free: int, wanted: Limits):
    plan = make_plan(model, "CPU", free, wanted)
    (stage,) = plan.stages
    assert sorted(i for g in plan.groups for i in g.layers) == list(range(model.n_layer))
    assert plan.groups[0].window is None or None not in model.layer_windows
    assert plan.kv_tokens >= BLOCK_SIZE and plan.kv_tokens % BLOCK_SIZE == 0
    assert 1 <= plan.max_model_len <= min(plan.kv_tokens, model.n_ctx_train)
    assert stage.kv_bytes == kv_bytes(plan.groups, model.kv_bytes_per_token)
    assert plan.total_bytes == model.weight_bytes + model.compute_bytes + stage.kv_bytes
    assert plan.fits == (plan.total_bytes <= int(free * SPARE))
    assert plan.short_by_bytes == max(0, plan.total_bytes - int(free * SPARE))
    assert plan.reasons
    if wanted.kv_tokens:
        assert 0 <= plan.kv_tokens - wanted.kv_tokens < BLOCK_SIZE
    elif wanted.kv_memory:
        assert stage.kv_bytes <= wanted.kv_memory or plan.kv_tokens == BLOCK_SIZE


@given(models, st.integers(0, 256 * GIB), limits)
def test_a_default_cache_takes_a_quarter_of_the_free_memory_or_the_least_useful(model, free, wanted):
    wanted = Limits(wanted.ctx, 0, 0, wanted.max_num_seqs, wanted.max_num_batched_tokens)
    plan = make_plan(model, "CPU", free, wanted)
    context = min(wanted.ctx or model.n_ctx_train, model.n_ctx_train)
    least = context if wanted.ctx else min(context, MIN_CONTEXT)
    assert plan.stages[0].kv_bytes <= int(free * SHARE) or plan.kv_tokens - least < BLOCK_SIZE
    assert plan.kv_tokens - wanted.max_num_seqs * context < BLOCK_SIZE


@given(models, limits, st.integers(1, 1 << 20))
def test_windowed_pools_hold_what_running_requests_attend(model: ModelFacts, wanted: Limits, tokens: int):
    groups = kv_groups(model.layer_windows, tokens, wanted.max_num_seqs, wanted.max_num_batched_tokens)
    for group in groups:
        held = (group.num_blocks - 1) * BLOCK_SIZE
        if group.window is None:
            live = tokens
        else:
            live = wanted.max_num_seqs * (group.window + 2 * BLOCK_SIZE) + wanted.max_num_batched_tokens
        assert held >= min(tokens, live)
        assert held < tokens + BLOCK_SIZE
        assert held <= max(tokens, 2 * live) + BLOCK_SIZE


def test_more_memory_never_gives_a_smaller_cache():
    sizes = [make_plan(facts(), "CPU", n * GIB // 4, Limits()).kv_tokens for n in range(1, 40)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 32 * 8192


def test_shortage_is_told_in_one_line_with_bytes_and_a_remedy():
    plan = make_plan(facts(), "CPU", GIB, Limits(kv_tokens=1 << 20))
    assert not plan.fits
    line = explain_shortage(plan, facts())
    assert "\n" not in line
    assert str(plan.short_by_bytes) in line and "--kv-tokens" in line
    assert plan.short_by_bytes == 110 * (1 << 20) + (4096 << 20) + 16 * 4096 - int(GIB * SPARE)


def test_no_cache_size_helps_when_the_weights_alone_do_not_fit():
    model = facts(weight_bytes=2 * GIB)
    line = explain_shortage(make_plan(model, "CPU", GIB, Limits()), model)
    assert "--kv-tokens" not in line and "free some memory" in line


def test_an_explicit_context_is_worth_more_than_a_quarter():
    model = facts(kv_bytes_per_token=(1 << 16,) * 4)  # 2 GiB for 8192 tokens
    assert make_plan(model, "CPU", 4 * GIB, Limits()).kv_tokens == 4080
    plan = make_plan(model, "CPU", 4 * GIB, Limits(ctx=8192))
    assert plan.fits and plan.max_model_len == 8192


def test_choosing_devices():
    assert devices.choose((), 3, [CPU, GPU]).threads == 3
    assert devices.choose(("cpu:threads=5",), 3, [CPU, GPU]).threads == 5
    assert devices.choose((), 0, [CPU]).threads == devices.usable_cores() >= 1
    for bad in (
        "CUDA7",
        "CPU:threads=0",
        "CPU:threads",
        "CPU:cores=2",
        "rpc=host:1",
        "CUDA0",
        "CUDA0:threads=2",
    ):
        with pytest.raises(DeviceError, match="--device"):
            devices.choose((bad,), 0, [CPU, GPU])
    with pytest.raises(DeviceError, match="several devices"):
        devices.choose(("CPU", "CUDA0"), 0, [CPU, GPU])


def test_container_limits(tmp_path):
    assert devices.memory_limit(tmp_path) is None and devices.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB - (200 << 20)}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {100 << 20}\n")
    assert devices.cpu_quota(tmp_path) == 2
    assert devices.memory_limit(tmp_path) == GIB
    assert devices.free_memory(tmp_path) == min(300 << 20, psutil.virtual_memory().available)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert devices.memory_limit(tmp_path) is None and devices.cpu_quota(tmp_path) is None
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert devices.memory_limit(tmp_path) is None


@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_the_plan_bounds_what_a_loaded_stage_holds(fixture: str, request: pytest.FixtureRequest):
    settings = Settings(
        model=str(request.getfixturevalue(fixture)), kv_tokens=1024, threads=1, max_num_seqs=4
    )
    prepared = prepare(settings)
    (planned,) = prepared.plan.stages
    stage = open_stage(prepared, settings, lambda text, done: None)
    held = stage.memory()
    stage.close()
    assert 0 <= held["kv"] - planned.kv_bytes <= 1 << 20  # alignment
    assert 0.9 * planned.weight_bytes < held["weights"] <= planned.weight_bytes
    assert held["compute"] <= planned.compute_bytes


@pytest.mark.parametrize("used", [1, 6])
@pytest.mark.parametrize("weight_type", ["F32", "Q8_0", "Q3_K"])  # the last is ggml's to multiply
def test_the_plan_bounds_what_experts_take(tmp_path, used: int, weight_type: str):
    shape = {"n_embd": 256, "n_ff": 256, "n_heads": 8, "head_dim": 32, "n_layers": 1}
    path = tiny_model(
        tmp_path / "m.gguf", n_experts=40, n_experts_used=used, weight_type=weight_type, **shape
    )
    settings = Settings(model=str(path), kv_tokens=1024, threads=1, max_num_seqs=4)
    prepared = prepare(settings)
    stage = open_stage(prepared, settings, lambda text, done: None)
    held = stage.memory()
    stage.close()
    assert held["weights"] <= prepared.facts.weight_bytes
    assert held["compute"] <= prepared.facts.compute_bytes


def test_memory_beyond_any_use_is_not_claimed() -> None:
    limits = Limits(ctx=0, kv_memory=900 << 30, kv_tokens=0, max_num_seqs=4, max_num_batched_tokens=64)
    facts = ModelFacts(
        n_ctx_train=1024,
        layer_windows=(None,),
        kv_bytes_per_token=(64,),
        weight_bytes=1 << 20,
        compute_bytes=1 << 20,
    )
    plan = make_plan(facts, "CPU", 1 << 40, limits)
    assert plan.kv_tokens == 4 * 1024
    assert any("4 requests of 1024 tokens" in reason for reason in plan.reasons)
