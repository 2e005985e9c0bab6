"""The plan of a model that libllama computes: one stage, whatever devices its layers are on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from backends.ggml.models import FAMILIES
from backends.kv_format import row_bytes
from backends.llama.config import F32_BYTES, LlamaConfig
from backends.llama.library import MAX_SEQUENCES
from backends.llama.spec import LlamaSpec
from hetero.kv_types import KVTypes
from hetero.plan.devices import DeviceChoice
from hetero.plan.estimate import estimate
from hetero.plan.host_memory import HostPlan
from hetero.plan.make import PlanError, Planned, check_counts, labels_of, limits_of, place_of
from hetero.plan.planner import BLOCK_SIZE, Limits, ModelFacts, Place, Plan, make_plan
from hetero.plan.problem import SplitProblem
from hetero.plan.reasons import cut_reasons, left_out
from hetero.plan.split import parts_of
from hetero.settings import OFF, Settings
from quant.gguf import GGUFFile

LIVE_ROWS = 4  # n_ff- and n_embd-wide activations that a step's graph holds at the same time
MASK_BYTES = 6  # of a token in the cache and one of a step: f32, and f16 for the attention
COUNTED = 1 << 20  # tokens at a time of a model that keeps none of them
KEPT = 96  # sequences of known beginnings, beside those of the requests
BIG = 512  # tokens that libllama computes at once, at most


def plan_fallback(
    gguf: GGUFFile, config: LlamaConfig, choices: Sequence[DeviceChoice], settings: Settings
) -> Planned:
    """Split the layers by guessed times and by memory, over devices and by settings that `arrange` returned.

    A plan that does not fit is returned. Raises PlanError.
    """
    _check_settings(config, settings)
    labels = labels_of(choices)
    places = [replace(place_of(c, label), gathers=False) for c, label in zip(choices, labels, strict=True)]
    limits = _limits(config, settings)
    facts = fallback_facts(gguf, config, limits, settings.kv_type)
    if len(choices) == 1:
        plan = make_plan(facts, places, [(0, 0, facts.n_layer)], limits)
    else:
        plan = _split(facts, limits, places, choices, labels, settings)
    reasons = (
        plan.reasons if config.keeps_tokens else ("KV cache: none, each request has a state of its own",)
    )
    plan = replace(plan, reasons=reasons, notes=(*notes_of(config, settings.engine), *plan.notes))
    return Planned(plan, facts, None)


def arrange(
    config: LlamaConfig, choices: Sequence[DeviceChoice], settings: Settings
) -> tuple[tuple[DeviceChoice, ...], Settings]:
    """The devices in the order of their layers: libllama's first ones are the CPU's. With them --split.

    Raises PlanError where libllama cannot use them together.
    """
    _check_devices(choices)
    check_counts(settings, choices, config.n_layer)
    order = sorted(range(len(choices)), key=lambda i: not _is_cpu(choices[i]))
    split = tuple(settings.split[i] for i in order) if settings.split else ()
    return tuple(choices[i] for i in order), replace(settings, split=split)


def notes_of(config: LlamaConfig, engine: str) -> tuple[str, ...]:
    """What the user goes without, a line for each thing. `engine`: the setting."""
    family = f"family {config.architecture!r}"
    why = f"there is no graph of ours for {family}"
    if config.architecture in FAMILIES:
        why = "as --engine says" if engine == "llama" else f"our graph of {family} does not take this file"
    lines = [
        f"libllama computes this model, {why}: several requests at a time are slower",
        "no RAM cache, no disk cache and no fp8 KV cache with libllama",
    ]
    if not config.keeps_prefixes:
        lines += [
            "known beginnings are computed again: the model's states cannot be cut",
            "nothing is guessed ahead (--spec), for the same reason",
        ]
    return tuple(lines)


def fallback_facts(gguf: GGUFFile, config: LlamaConfig, limits: Limits, kv_types: KVTypes) -> ModelFacts:
    """Sizes in bytes, bounded from above. States and masks count as part of what a step needs."""
    layers, ends = [0] * config.n_layer, Counter[str]()
    for info in gguf.tensors.values():
        parts = info.name.split(".")
        if parts[0] == "blk" and parts[1:] and parts[1].isdecimal() and int(parts[1]) < config.n_layer:
            layers[int(parts[1])] += info.nbytes
        else:
            ends["embed" if parts[0].startswith(("token_embd", "per_layer")) else "head"] += info.nbytes
    tied = not any(name.startswith("output.") for name in gguf.tensors)
    sequences = sequences_of(config, limits.max_num_seqs)
    rows = min(BIG, max(limits.max_num_batched_tokens, sequences))
    row = LIVE_ROWS * (2 * config.n_embd + config.n_ff + config.n_head_kv * config.head_dim_k) * F32_BYTES
    mask = -(-MASK_BYTES * rows // config.n_layer) if config.keeps_tokens else 0
    return ModelFacts(
        n_ctx_train=config.n_ctx_train,
        layer_windows=(None,) * config.n_layer,
        kv_bytes_per_token=tuple(mask + _token_bytes(widths, kv_types) for widths in config.kv_widths),
        layer_bytes=tuple(layers),
        embed_bytes=ends["embed"],
        head_bytes=ends["head"] + (ends["embed"] if tied else 0),
        shared_bytes=ends["embed"] if tied else 0,
        compute_bytes=rows * row + sequences * config.state_bytes,
        logits_bytes=2 * max(sequences, limits.max_num_seqs + limits.draft_rows) * config.n_vocab * F32_BYTES,
        kv_types=kv_types,
        plain_kv_types=kv_types,
    )


def llama_spec(
    plan: Plan, config: LlamaConfig, choices: Sequence[DeviceChoice], settings: Settings
) -> LlamaSpec:
    """How libllama is to hold what was planned."""
    placed = [(choices[stage.index], stage.layers[1] - stage.layers[0]) for stage in plan.stages]
    away = [(choice.spec, count) for choice, count in placed if not _is_cpu(choice)]
    return LlamaSpec(
        devices=tuple(spec for spec, _ in away),
        layers=tuple(count for _, count in away),
        sequences=sequences_of(config, settings.max_num_seqs),
        cells=plan.groups[0].num_blocks * BLOCK_SIZE,
        threads=max((choice.threads for choice, _ in placed), default=0) or settings.threads,
        keeps_prefixes=config.keeps_prefixes,
        key_type=settings.kv_type.keys,
        value_type=settings.kv_type.values,
    )


def no_host_memory(plan: Plan) -> HostPlan:
    """Blocks are libllama's own: none can be moved."""
    none = (0,) * len(plan.groups)
    return HostPlan(none, none, "libllama's cache stays where it is")


def sequences_of(config: LlamaConfig, max_num_seqs: int) -> int:
    """Sequences that libllama has to know. A state for each takes memory; where there is none, they cost
    next to nothing."""
    return min(MAX_SEQUENCES, max_num_seqs + KEPT) if config.keeps_prefixes else max_num_seqs


def _split(
    facts: ModelFacts,
    limits: Limits,
    places: Sequence[Place],
    choices: Sequence[DeviceChoice],
    labels: Sequence[str],
    settings: Settings,
) -> Plan:
    numbers: dict[tuple[int, int], int] = {}
    kinds = list(zip(facts.layer_bytes, facts.kv_bytes_per_token, strict=True))
    classes = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
    times = [estimate(facts, classes, choice, facts.rows_bytes) for choice in choices]
    problem = SplitProblem(facts, limits, places, times, classes, settings.objective, bool(settings.device))
    parts = parts_of(settings.split) if settings.split else problem.choose()
    plan = problem.plan(parts)
    reasons = cut_reasons(problem, parts, plan.kv_tokens, labels, bool(settings.split))
    stages = tuple(replace(stage, reason=reason) for stage, reason in zip(plan.stages, reasons, strict=True))
    return replace(
        plan, stages=stages, notes=(*plan.notes, *left_out(problem, parts, plan.kv_tokens, labels))
    )


def _limits(config: LlamaConfig, settings: Settings) -> Limits:
    limits = replace(limits_of(settings), pipeline_depth=1)
    if config.keeps_tokens or limits.kv_tokens:
        return limits
    context = min(limits.ctx or config.n_ctx_train, config.n_ctx_train)
    return replace(limits, kv_memory=0, kv_tokens=max(context, min(COUNTED, limits.max_num_seqs * context)))


def _token_bytes(widths: tuple[int, int], kv_types: KVTypes) -> int:
    return row_bytes(kv_types.keys, widths[0]) + row_bytes(kv_types.values, widths[1])


def _check_settings(config: LlamaConfig, settings: Settings) -> None:
    """What was asked for and cannot be had. Raises PlanError."""
    family = f"libllama computes family {config.architecture!r}"
    if "fp8" in (settings.kv_type.keys, settings.kv_type.values):
        raise PlanError(f"--kv-type {settings.kv_type}: {family}, which has no fp8; use f16 or q8_0")
    if settings.disk_cache is not None or settings.ram_cache not in (0, OFF):
        flag = "--ram-cache" if settings.disk_cache is None else "--disk-cache"
        raise PlanError(f"{flag}: {family}, whose KV cache cannot be moved; leave it out")
    if settings.cpu_moe:
        raise PlanError(f"--cpu-moe {settings.cpu_moe}: {family}, and keeps layers whole; leave it out")
    if settings.max_num_seqs > MAX_SEQUENCES:
        raise PlanError(f"--max-num-seqs {settings.max_num_seqs}: {family}, with {MAX_SEQUENCES} at the most")
    if settings.spec_draft is not None and not config.keeps_prefixes:
        raise PlanError(f"--spec draft:{settings.spec_draft}: this model's states cannot take back a guess")
    for kind, width in zip((settings.kv_type.keys, settings.kv_type.values), _dims(config), strict=True):
        try:
            row_bytes(kind, width)
        except ValueError as exc:
            raise PlanError(f"--kv-type {settings.kv_type}: {exc} in this model; use f16") from None


def _dims(config: LlamaConfig) -> tuple[int, int]:
    return config.head_dim_k, config.head_dim_v


def _check_devices(choices: Sequence[DeviceChoice]) -> None:
    worker = next((choice for choice in choices if choice.spec.worker), None)
    if worker is not None:
        raise PlanError(f"--device {worker.label}: a worker holds no layers of libllama; rpc=HOST:PORT can")
    if sum(map(_is_cpu, choices)) > 1:
        raise PlanError("--device: libllama has one CPU device; give it all threads, with CPU:threads=N")


def _is_cpu(choice: DeviceChoice) -> bool:
    """Whether it is this machine's CPU, which libllama always has."""
    return choice.device.kind == "cpu" and not choice.spec.endpoint


__all__ = [
    "arrange",
    "fallback_facts",
    "llama_spec",
    "no_host_memory",
    "notes_of",
    "plan_fallback",
    "sequences_of",
]
