"""The memory map as arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model

from backends.ggml import layers
from backends.ggml.layers import DeviceLayers
from backends.ggml.stage import GgmlStage
from hetero.kv_types import KVTypes, parse_kv_types
from hetero.launch import open_stages
from hetero.plan.devices import DeviceChoice
from hetero.plan.host import usable_cores
from hetero.plan.make import GUESSED
from hetero.plan.planner import (
    BLOCK_SIZE,
    SHARE,
    Limits,
    ModelFacts,
    Place,
    Plan,
    explain_shortage,
    format_size_of,
    kv_bytes,
    kv_groups,
    make_plan,
)
from hetero.plan.sizes import MIN_CONTEXT, SPARE
from hetero.prepare import prepare
from hetero.settings import Settings

GIB = 1 << 30


def facts(**changes) -> ModelFacts:
    values = {
        "n_ctx_train": 8192,
        "layer_windows": (None,) * 4,
        "kv_bytes_per_token": (1024,) * 4,
        "layer_bytes": (20 << 20,) * 4,
        "embed_bytes": 5 << 20,
        "head_bytes": 15 << 20,
        "compute_bytes": 10 << 20,
    }
    return ModelFacts(**{**values, **changes})


def on_one(model: ModelFacts, free: int, wanted: Limits) -> Plan:
    """The whole model on a CPU with so many free bytes."""
    return make_plan(model, [Place("CPU", free, "memory")], [(0, 0, model.n_layer)], wanted)


models = st.builds(
    lambda layers, n_ctx, ends, compute: ModelFacts(
        n_ctx,
        tuple(window for window, _, _ in layers),
        tuple(kv for _, kv, _ in layers),
        tuple(weights for _, _, weights in layers),
        *ends,
        compute,
        rows_bytes=compute // 10,
        logits_bytes=compute // 5,
        gather_bytes_per_token=1000,
    ),
    st.lists(
        st.tuples(st.none() | st.integers(1, 5000), st.integers(16, 1 << 16), st.integers(0, 8 * GIB)),
        min_size=1,
        max_size=12,
    ),
    st.integers(16, 1 << 18),
    st.tuples(st.integers(0, GIB), st.integers(0, GIB)),
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
    plan = on_one(model, free, wanted)
    (stage,) = plan.stages
    assert sorted(i for g in plan.groups for i in g.layers) == list(range(model.n_layer))
    assert plan.groups[0].window is None or None not in model.layer_windows
    assert plan.kv_tokens >= BLOCK_SIZE and plan.kv_tokens % BLOCK_SIZE == 0
    assert 1 <= plan.max_model_len <= min(plan.kv_tokens, model.n_ctx_train)
    assert stage.kv_bytes == kv_bytes(plan.groups, model.kv_bytes_per_token)
    assert plan.total_bytes == model.weight_bytes + model.compute_bytes + model.logits_bytes + stage.kv_bytes
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
    plan = on_one(model, free, wanted)
    context = min(wanted.ctx or model.n_ctx_train, model.n_ctx_train)
    least = context if wanted.ctx else min(context, MIN_CONTEXT)
    assert plan.stages[0].kv_bytes <= int(free * SHARE) or plan.kv_tokens - least < BLOCK_SIZE
    assert plan.kv_tokens - wanted.max_num_seqs * context < BLOCK_SIZE


@st.composite
def cut_up(draw):
    """A model, places in some memories, and cuts that put each layer on one of them."""
    model = draw(models)
    count = draw(st.integers(1, min(4, model.n_layer)))
    memories = draw(st.lists(st.sampled_from("ab"), min_size=count, max_size=count))
    free = {name: draw(st.integers(0, 64 * GIB)) for name in "ab"}
    places = [Place(f"dev{i}", free[m], m, m == "a", m == "b") for i, m in enumerate(memories)]
    inner = (
        draw(st.sets(st.integers(1, model.n_layer - 1), min_size=count - 1, max_size=count - 1))
        if count > 1
        else ()
    )
    ends = [0, *sorted(inner), model.n_layer]
    order = draw(st.permutations(range(count)))
    return model, places, [(d, ends[i], ends[i + 1]) for i, d in enumerate(order)]


@given(cut_up(), limits)
def test_a_plan_of_several_stages_adds_up_in_each_memory(problem, wanted: Limits):
    model, places, cuts = problem
    plan = make_plan(model, places, cuts, wanted)
    assert [(s.index, *s.layers) for s in plan.stages] == cuts
    assert sum(s.kv_bytes for s in plan.stages) == kv_bytes(plan.groups, model.kv_bytes_per_token)
    assert sum(s.weight_bytes for s in plan.stages) == model.weight_bytes
    missing = 0
    for name in {p.memory for p in places}:
        stages = [s for s in plan.stages if places[s.index].memory == name]
        missing += max(0, sum(s.total_bytes for s in stages) - int(stages[0].free_bytes * SPARE))
    assert plan.short_by_bytes == missing
    assert plan.fits == (missing == 0)
    for stage in plan.stages:
        gathered = 1000 * min(plan.kv_tokens, plan.max_model_len) * places[stage.index].gathers
        assert stage.compute_bytes >= model.compute_bytes + gathered
    if not plan.fits:
        line = explain_shortage(plan)
        assert "\n" not in line
        assert all(str(s.nbytes) in line and s.devices[0] in line for s in plan.shortages)


def test_devices_that_share_a_memory_are_counted_together():
    places = [Place("CPU:threads=1", GIB, "memory"), Place("CPU:threads=3", GIB, "memory")]
    fits = make_plan(facts(), places, [(0, 0, 2), (1, 2, 4)], Limits(kv_tokens=1 << 17))
    assert fits.fits and fits.free_bytes == GIB
    plan = make_plan(facts(), places, [(0, 0, 2), (1, 2, 4)], Limits(kv_tokens=1 << 18))
    assert not plan.fits and max(s.total_bytes for s in plan.stages) < GIB * SPARE
    assert plan.shortages[0].devices == ("CPU:threads=1", "CPU:threads=3")
    assert "CPU:threads=1 and CPU:threads=3" in explain_shortage(plan)


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
    sizes = [on_one(facts(), n * GIB // 4, Limits()).kv_tokens for n in range(1, 40)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 32 * 8192


def test_shortage_is_told_in_one_line_with_bytes_and_a_remedy():
    plan = on_one(facts(), GIB, Limits(kv_tokens=1 << 20))
    assert not plan.fits
    line = explain_shortage(plan)
    assert "\n" not in line
    assert str(plan.short_by_bytes) in line and "--kv-tokens" in line
    assert str(plan.fitting_tokens) in line
    assert on_one(facts(), GIB, Limits(kv_tokens=plan.fitting_tokens)).fits
    assert not on_one(facts(), GIB, Limits(kv_tokens=plan.fitting_tokens + BLOCK_SIZE)).fits
    assert plan.short_by_bytes == 110 * (1 << 20) + (4096 << 20) + 16 * 4096 - int(GIB * SPARE)


def test_no_cache_size_helps_when_the_weights_alone_do_not_fit():
    model = facts(layer_bytes=(GIB // 2,) * 4)
    line = explain_shortage(on_one(model, GIB, Limits()))
    assert "--kv-tokens" not in line and "free some memory" in line


def test_an_explicit_context_is_worth_more_than_a_quarter():
    model = facts(kv_bytes_per_token=(1 << 16,) * 4)  # 2 GiB for 8192 tokens
    assert on_one(model, 4 * GIB, Limits()).kv_tokens == 4080
    plan = on_one(model, 4 * GIB, Limits(ctx=8192))
    assert plan.fits and plan.max_model_len == 8192


@pytest.mark.parametrize("split", [(), (7, 11)])
@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_the_plan_bounds_what_loaded_stages_hold(fixture: str, split, request: pytest.FixtureRequest):
    if split and usable_cores() < 2:
        pytest.skip("needs two cores")
    if split and fixture == "smollm2_path":
        split = (7, 23)
    settings = Settings(
        model=str(request.getfixturevalue(fixture)),
        kv_tokens=1024,
        max_num_seqs=4,
        threads=0 if split else 1,
        device=("CPU:threads=1",) * len(split),
        split=split,
    )
    prepared = prepare(settings, measure=GUESSED)
    stages = open_stages(prepared, settings, lambda text, done: None)
    for planned, stage in zip(prepared.plan.stages, stages, strict=True):
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
    (planned,) = prepared.plan.stages
    (stage,) = open_stages(prepared, settings, lambda text, done: None)
    held = stage.memory()
    stage.close()
    assert 0.9 * planned.weight_bytes < held["weights"] <= planned.weight_bytes
    assert held["compute"] <= planned.compute_bytes


def test_memory_beyond_any_use_is_not_claimed() -> None:
    limits = Limits(ctx=0, kv_memory=900 << 30, kv_tokens=0, max_num_seqs=4, max_num_batched_tokens=64)
    facts = ModelFacts(
        n_ctx_train=1024,
        layer_windows=(None,),
        kv_bytes_per_token=(64,),
        layer_bytes=(1 << 20,),
        embed_bytes=0,
        head_bytes=0,
        compute_bytes=1 << 20,
    )
    plan = on_one(facts, 1 << 40, limits)
    assert plan.kv_tokens == 4 * 1024
    assert any("4 requests of 1,024 tokens" in reason for reason in plan.reasons)


def test_devices_without_our_kernels_have_formats_of_their_own():
    model = facts(
        kv_bytes_per_token=(132,) * 4,
        plain_kv_bytes_per_token=(136,) * 4,
        kv_types=KVTypes("fp8", "fp8"),
        plain_kv_types=KVTypes("q8_0", "q8_0"),
    )
    places = [Place("CPU", GIB, "memory"), Place("CUDA0", GIB, "card", shared=False, gathers=True)]
    plan = make_plan(model, places, [(0, 0, 3), (1, 3, 4)], Limits(kv_tokens=16384))
    blocks = 16384 // BLOCK_SIZE + 1
    assert [s.kv_bytes for s in plan.stages] == [3 * 132 * 16 * blocks, 136 * 16 * blocks]
    assert [str(s.kv_types) for s in plan.stages] == ["fp8", "q8_0"]
    (note,) = [n for n in plan.notes if "fp8" in n]
    assert note.startswith("CUDA0: ") and "--kv-type fp8 is q8_0" in note
    alone = make_plan(model, places[:1], [(0, 0, 4)], Limits(kv_tokens=16384))
    assert not any("fp8" in n for n in alone.notes)
    bounded = make_plan(model, places, [(0, 0, 3), (1, 3, 4)], Limits(kv_memory=20 << 20))
    assert 19 << 20 < sum(s.kv_bytes for s in bounded.stages) <= 20 << 20
    halves = replace(model, kv_bytes_per_token=(66,) * 4, plain_kv_bytes_per_token=(68,) * 4)
    held = format_size_of("half", plan, halves, Limits(kv_tokens=16384), places)
    assert 2 * 16384 <= held.tokens < 2 * 16384 + 2 * BLOCK_SIZE
    assert held.nbytes == sum(s.kv_bytes for s in plan.stages) // 2
    assert format_size_of("same", plan, model, Limits(kv_tokens=16384), places).tokens == 16384


@pytest.mark.parametrize("kept", ["f16", "q8_0", "k=q8_0,v=f16", "k=f16,v=q8_0"])
def test_the_plan_bounds_what_plain_operators_take(tmp_path, kept: str, monkeypatch):
    """Of two formats side by side, as a driver would have it that attends f16 alone."""
    monkeypatch.setattr(GgmlStage, "_kind", lambda self: DeviceLayers)
    monkeypatch.setattr(DeviceChoice, "own_kernels", False)
    monkeypatch.setattr(layers, "can_flash_attend", lambda _, *shape: len(set(shape[4:6])) < 2)
    path = tiny_model(tmp_path / "m.gguf", n_heads=4, n_kv_heads=2, head_dim=64, n_ctx=16384)
    settings = Settings(
        model=str(path),
        ctx=16384,
        kv_tokens=16384,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_type=parse_kv_types(kept),
        threads=1,
        isolate="off",
    )
    prepared = prepare(settings)
    (planned,), (stage,) = prepared.plan.stages, open_stages(prepared, settings, lambda text, done: None)
    held = stage.memory()
    stage.close()
    assert 0.4 * planned.compute_bytes < held["compute"] <= planned.compute_bytes
    assert 0 <= held["kv"] - planned.kv_bytes <= 1 << 20  # what lies behind the last block
