"""From a model, devices and settings to a plan: sizes, times, the split, and why it is so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from backends.base import StageBackend
from backends.ggml.models.config import ModelConfig
from backends.ggml.stage import StageSpec
from backends.kv_format import KV_TYPES, Q8_BLOCK, row_bytes
from hetero.kv_types import KVTypes
from hetero.plan.calibrate import OpenStage, Subject
from hetero.plan.devices import DeviceChoice
from hetero.plan.estimate import estimate
from hetero.plan.experts import (
    ExpertsError,
    beside_experts,
    check_count,
    fewest,
    has_room,
    require_room,
    with_experts,
)
from hetero.plan.facts import layer_classes, model_facts, with_kv_types
from hetero.plan.forecast import Forecast, forecast
from hetero.plan.host_memory import NO_STATES
from hetero.plan.measured import cached_times, measured_times
from hetero.plan.planner import Limits, ModelFacts, Place, Plan, format_size_of, make_plan
from hetero.plan.problem import SplitProblem
from hetero.plan.reasons import cut_reasons, left_out
from hetero.plan.split import can_place, parts_of
from hetero.plan.times import DeviceTimes
from hetero.screen import ProgressCallback
from hetero.settings import Settings
from quant.gguf import GGUFFile

CHUNK = 512  # tokens of the largest chunk that is timed
MISSING, AGAIN, GUESSED = "missing", "again", "guessed"


class PlanError(ValueError):
    """These layers cannot be put on these devices: one line that names the setting."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with what it is based on. `forecast` is None where nothing is known of the device's speed."""

    plan: Plan
    facts: ModelFacts
    forecast: Forecast | None


def plan_model(
    gguf: GGUFFile,
    config: ModelConfig,
    choices: Sequence[DeviceChoice],
    settings: Settings,
    open_stage: OpenStage,
    progress: ProgressCallback,
    measure: str = MISSING,
) -> Planned:
    """Split the model over the devices and plan the memory of each.

    `open_stage` opens the stages that are timed. `measure`: the devices' times come from the cache, or
    are measured where they are MISSING there, or AGAIN, or else GUESSED. A single device is only
    measured AGAIN: there is nothing to split. A plan that does not fit is returned, not raised.
    Raises PlanError, and whatever opening and running a stage raises.
    """
    limits = limits_of(settings)
    _check_kv_types(settings, config)
    check_counts(settings, choices, config.n_layer, config.last_cut)
    count = _host_experts(gguf, config, choices, settings)
    facts = model_facts(gguf, config, limits, settings.kv_type, count)
    subject = _subject(gguf, config, settings, open_stage, count)
    times = _times(subject, facts, choices, progress, measure)
    labels = labels_of(choices)
    places = _places(choices, facts)
    if times is None:
        made = Planned(make_plan(facts, places, [(0, 0, facts.n_layer)], limits), facts, None)
    else:
        problem = SplitProblem(
            facts, limits, places, times, subject.classes, settings.objective, bool(settings.device)
        )
        made = _split(problem, settings.split, labels)
    formats = tuple(
        format_size_of(name, made.plan, with_kv_types(facts, config, limits, types), limits, places)
        for name, types in _formats(config)
    )
    notes = made.plan.notes
    if facts.recurrent and (settings.disk_cache is not None or settings.ram_cache > 0):
        notes += (f"--ram-cache and --disk-cache are without effect: {NO_STATES}",)
    plan = replace(made.plan, formats=formats, notes=notes)
    return replace(made, plan=with_experts(plan, facts, settings.cpu_moe))


def _host_experts(
    gguf: GGUFFile, config: ModelConfig, choices: Sequence[DeviceChoice], settings: Settings
) -> int:
    """Layers whose experts are in main memory: as --cpu-moe says, else as few as have to be."""
    limits = limits_of(settings)

    def facts_of(count: int) -> ModelFacts:
        return model_facts(gguf, config, limits, settings.kv_type, count)

    def fits(count: int) -> bool:
        facts = facts_of(count)
        places = _places(choices, facts)
        if len(places) == 1 or settings.split:
            counts = settings.split or (facts.n_layer,)
            cuts = [(p.device, p.first, p.last) for p in parts_of(counts)]
            return has_room(facts) and make_plan(facts, places, cuts, limits).fits
        classes = layer_classes(gguf, config, count)
        times = [estimate(facts, classes, choice, 4 * config.n_embd) for choice in choices]
        ordered = bool(settings.device)
        problem = SplitProblem(facts, limits, places, times, classes, settings.objective, ordered)
        return has_room(facts) and can_place(problem.memory(limits.least_tokens(facts)), ordered)

    try:
        check_count(settings, config, choices)
        if settings.cpu_moe:
            require_room(facts_of(settings.cpu_moe))
    except ExpertsError as exc:
        raise PlanError(str(exc)) from None
    return settings.cpu_moe or fewest(config, choices, fits)


def _places(choices: Sequence[DeviceChoice], facts: ModelFacts) -> list[Place]:
    labels = labels_of(choices)
    places = [place_of(choice, label) for choice, label in zip(choices, labels, strict=True)]
    return beside_experts(places, choices, facts.host_bytes)


def limits_of(settings: Settings) -> Limits:
    """What the settings say about sizes."""
    return Limits(
        settings.ctx,
        settings.kv_memory,
        settings.kv_tokens,
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
        settings.pipeline_depth,
        settings.objective == "capacity",
        settings.draft_rows,
    )


def calibrate_model(
    gguf: GGUFFile,
    config: ModelConfig,
    choices: Sequence[DeviceChoice],
    settings: Settings,
    open_stage: OpenStage,
    progress: ProgressCallback,
) -> tuple[DeviceTimes, ...]:
    """Measure the devices anew, for plans to come. Raises whatever opening and running a stage raises."""
    subject = _subject(gguf, config, settings, open_stage, settings.cpu_moe)
    return measured_times(subject, choices, progress, again=True)


def _check_kv_types(settings: Settings, config: ModelConfig) -> None:
    wanted = settings.kv_type
    for kind, dim, what in (
        (wanted.keys, config.head_dim_k, "keys"),
        (wanted.values, config.head_dim_v, "values"),
    ):
        try:
            row_bytes(kind, dim)
        except ValueError as exc:
            raise PlanError(
                f"--kv-type {wanted}: {exc} in the {what} of this model; use f16 or fp8"
            ) from None


def _formats(config: ModelConfig) -> list[tuple[str, KVTypes]]:
    """Those that the model's heads allow, keys and values alike."""
    blocks = config.head_dim_k % Q8_BLOCK == 0 and config.head_dim_v % Q8_BLOCK == 0
    return [(name, KVTypes(name, name)) for name in KV_TYPES if blocks or name != "q8_0"]


def _subject(
    gguf: GGUFFile, config: ModelConfig, settings: Settings, open_stage: OpenStage, host_experts: int
) -> Subject:
    chunk = min(CHUNK, settings.max_num_batched_tokens)

    def opened(choice: DeviceChoice, spec: StageSpec) -> StageBackend:
        return open_stage(choice, replace(spec, host_experts=host_experts, host_threads=settings.threads))

    return Subject(gguf, config, chunk, opened, settings.kv_type, host_experts)


def _split(problem: SplitProblem, counts: Sequence[int], labels: Sequence[str]) -> Planned:
    parts = parts_of(counts) if counts else problem.choose()
    plan = problem.plan(parts)
    view = forecast(problem, plan, labels)
    reasons = cut_reasons(problem, parts, plan.kv_tokens, labels, bool(counts))
    stages = tuple(
        replace(stage, seconds=seconds, reason=reason)
        for stage, seconds, reason in zip(plan.stages, view.stage_seconds, reasons, strict=True)
    )
    notes = (*plan.notes, *left_out(problem, parts, plan.kv_tokens, labels))
    if not view.measured and len(stages) > 1 and not counts:
        notes += ("the devices' speed is guessed, not measured: hetero plan --calibrate measures it",)
    return Planned(replace(plan, stages=stages, notes=notes), problem.facts, view)


def check_counts(
    settings: Settings, choices: Sequence[DeviceChoice], n_layer: int, last_cut: int | None = None
) -> None:
    """Raise PlanError unless the layers of --split, or some of all, are there for each device, which cannot
    begin behind layer `last_cut`."""
    counts, labels = settings.split, ", ".join(labels_of(choices))
    shown = ",".join(map(str, counts))
    if counts and len(counts) != len(choices):
        raise PlanError(f"--split {shown}: {len(counts)} numbers for {len(choices)} devices ({labels})")
    if counts and sum(counts) != n_layer:
        raise PlanError(f"--split {shown}: these are {sum(counts)} layers, the model has {n_layer}")
    if settings.device and len(choices) > n_layer:
        raise PlanError(f"--device: {len(choices)} devices ({labels}) for {n_layer} layers; name fewer")
    if last_cut is None:
        return
    together = f"layers {last_cut} to {n_layer - 1} attend the same keys and values and need one device"
    if len(counts) > 1 and n_layer - counts[-1] > last_cut:
        raise PlanError(f"--split {shown}: {together}; give the last one at least {n_layer - last_cut}")
    if settings.device and len(choices) > last_cut + 1:
        raise PlanError(f"--device: {len(choices)} devices ({labels}), but {together}; name fewer")


def _times(
    subject: Subject,
    facts: ModelFacts,
    choices: Sequence[DeviceChoice],
    progress: ProgressCallback,
    measure: str,
) -> tuple[DeviceTimes, ...] | None:
    """Times of all devices; None where a single one's are not known and need not be."""
    if measure == AGAIN or (measure == MISSING and len(choices) > 1):
        return measured_times(subject, choices, progress, again=measure == AGAIN)
    known = cached_times(subject, choices)
    found = [times for times in known if times is not None]
    if len(found) == len(choices):
        return tuple(found)
    if len(choices) == 1:
        return None
    return tuple(estimate(facts, subject.classes, choice, 4 * subject.config.n_embd) for choice in choices)


def labels_of(choices: Sequence[DeviceChoice]) -> list[str]:
    """What the user calls each device; numbered where he calls several the same."""
    names = [choice.label for choice in choices]
    return [
        f"{name} #{1 + names[:i].count(name)}" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]


def place_of(choice: DeviceChoice, label: str) -> Place:
    """A device as the planner sees it."""
    device, spec = choice.device, choice.spec
    machine = spec.endpoint or spec.worker
    memory = "main memory" if device.kind in ("cpu", "igpu") else device.device_id
    return Place(
        device=label,
        free_bytes=device.free_bytes,
        memory=f"{machine} {memory}",
        shared=device.kind != "gpu",
        gathers=not choice.own_kernels,
    )


__all__ = [
    "AGAIN",
    "GUESSED",
    "MISSING",
    "PlanError",
    "Planned",
    "calibrate_model",
    "check_counts",
    "labels_of",
    "limits_of",
    "place_of",
    "plan_model",
]
