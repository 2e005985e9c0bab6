"""Experts that main memory holds for devices with too little of their own (see ggml/host_experts.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from backends.ggml.models.config import ModelConfig
from hetero.plan.devices import DeviceChoice
from hetero.plan.host import free_memory
from hetero.plan.host_memory import SPARE, in_main_memory
from hetero.plan.planner import ModelFacts, Place, Plan
from hetero.settings import Settings
from hetero.sizes import format_size


class ExpertsError(ValueError):
    """--cpu-moe cannot be done here: one line."""


def layers_with_experts(config: ModelConfig) -> int:
    return sum(config.has_experts(layer) for layer in range(config.n_layer))


def check_count(settings: Settings, config: ModelConfig, choices: Sequence[DeviceChoice]) -> None:
    """Raise ExpertsError unless the experts of --cpu-moe layers can be in main memory."""
    count, there = settings.cpu_moe, layers_with_experts(config)
    if count > there:
        has = f"experts in {there} layers" if there else "no experts"
        raise ExpertsError(f"--cpu-moe {count}: this model has {has}")
    for choice in choices:
        if count and choice.spec.worker:
            raise ExpertsError(
                f"--cpu-moe {count}: {choice.label} is on another machine, whose memory is not known here"
            )
    if count and all(choice.own_kernels for choice in choices):
        raise ExpertsError(f"--cpu-moe {count}: a CPU has them in main memory anyway; name another --device")


def fewest(config: ModelConfig, choices: Sequence[DeviceChoice], fits: Callable[[int], bool]) -> int:
    """The fewest layers whose experts have to be in main memory for a plan to fit; 0 where it fits without,
    or never. `fits` says so of a number of layers, and of more if of fewer.
    """
    alone = [choice for choice in choices if not (in_main_memory(choice) or choice.spec.worker)]
    most = layers_with_experts(config)
    if not (most and alone) or any(choice.spec.worker for choice in choices) or fits(0) or not fits(most):
        return 0
    low, high = 0, most  # does not fit, fits
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def beside_experts(places: Sequence[Place], choices: Sequence[DeviceChoice], nbytes: int) -> list[Place]:
    """The devices' memory when experts of `nbytes` take their part of main memory."""
    return [
        replace(place, free_bytes=max(0, place.free_bytes - nbytes)) if in_main_memory(choice) else place
        for place, choice in zip(places, choices, strict=True)
    ]


def has_room(facts: ModelFacts) -> bool:
    """Whether main memory has room for the experts that are to be there."""
    return facts.host_bytes <= SPARE * free_memory()


def require_room(facts: ModelFacts) -> None:
    if not has_room(facts):
        raise ExpertsError(
            f"--cpu-moe {facts.host_experts}: these experts take {format_size(facts.host_bytes)} of main "
            f"memory, of which {format_size(int(SPARE * free_memory()))} can be used"
        )


def with_experts(plan: Plan, facts: ModelFacts, asked: int) -> Plan:
    """The plan that says what main memory holds, and why. `asked`: of --cpu-moe."""
    if not facts.host_experts:
        return plan
    count = facts.host_experts
    layers = f"{count} layer{'s' if count > 1 else ''}"
    why = f"--cpu-moe {asked}" if asked else "the devices have no room for them"
    reason = f"experts of {layers} in main memory ({format_size(facts.host_bytes)}): {why}"
    return replace(plan, host_experts=count, host_bytes=facts.host_bytes, reasons=(*plan.reasons, reason))


__all__ = [
    "ExpertsError",
    "beside_experts",
    "check_count",
    "fewest",
    "has_room",
    "layers_with_experts",
    "require_room",
    "with_experts",
]
