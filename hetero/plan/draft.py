"""Where a draft model goes, and what it leaves of the memory for the model that it guesses for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from backends.base import DeviceInfo, StageBackend
from backends.ggml.models.config import ModelConfig, read_config
from backends.ggml.models.config import ModelError as ConfigError
from backends.ggml.stage import StageSpec
from hetero.kv_types import F16
from hetero.models import ModelError, ResolvedModel, resolve
from hetero.plan import devices
from hetero.plan.devices import DeviceChoice, DeviceError
from hetero.plan.host_memory import in_main_memory
from hetero.plan.make import GUESSED, PlanError, Planned, place_of, plan_model
from hetero.plan.planner import StagePlan, explain_shortage
from hetero.screen import ProgressCallback
from hetero.settings import OFF, Settings
from quant.gguf import GGUFError, GGUFFile, open_gguf

_SAME = ("model", "bos_token_id", "eos_token_id")
_KINDS = ("gpu", "igpu", "cpu")  # the fastest first
PlanMain = Callable[[Sequence[DeviceChoice]], Planned]


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft model, on one device."""

    model: ResolvedModel
    gguf: GGUFFile
    config: ModelConfig
    settings: Settings  # as if it were served
    choice: DeviceChoice
    planned: Planned

    @property
    def stage(self) -> StagePlan:
        return self.planned.plan.stages[0]


def plan_with_draft(
    settings: Settings,
    gguf: GGUFFile,
    choices: tuple[DeviceChoice, ...],
    offered: Sequence[DeviceInfo],
    plan_main: PlanMain,
    progress: ProgressCallback = lambda text, done: None,
) -> tuple[DraftPlan | None, tuple[DeviceChoice, ...], Planned]:
    """The draft model of --spec, if any, what it leaves of the main model's devices, and that one's plan.

    `gguf`, `choices`: the main model's. `offered`: all devices. `plan_main` plans the main model on devices.
    The draft model's KV cache holds as many tokens as the main one's. A plan of the main model that does not
    fit is returned. Raises PlanError, and what `plan_main` raises.
    """
    if settings.spec_draft is None:
        return None, choices, plan_main(choices)
    model, draft_gguf, config = _open(settings.spec_draft, gguf, progress)
    alone = plan_main(choices)
    candidates = _candidates(settings, choices, offered)
    for choice in candidates:
        draft = _plan(settings, model, draft_gguf, config, choice, alone)
        rest = without(choices, draft)
        main = plan_main(rest)
        if (draft.planned.plan.fits and main.plan.fits) or choice is candidates[-1]:
            break
    if not draft.planned.plan.fits:
        raise PlanError(f"--spec draft:{settings.spec_draft}: {explain_shortage(draft.planned.plan)}")
    if main.plan.kv_tokens < alone.plan.kv_tokens:
        draft = _plan(settings, model, draft_gguf, config, choice, main)
    return draft, rest, main


def without(choices: Sequence[DeviceChoice], draft: DraftPlan) -> tuple[DeviceChoice, ...]:
    """The same devices, and what a draft model leaves of their memory."""
    memory, held = place_of(draft.choice, "").memory, draft.stage.total_bytes
    return tuple(
        replace(c, device=replace(c.device, free_bytes=max(0, c.device.free_bytes - held)))
        if place_of(c, "").memory == memory
        else c
        for c in choices
    )


def main_memory_bytes(draft: DraftPlan | None) -> int:
    """What a draft model takes of this machine's main memory."""
    return draft.stage.total_bytes if draft is not None and in_main_memory(draft.choice) else 0


def _open(
    name: str, main: GGUFFile, progress: ProgressCallback
) -> tuple[ResolvedModel, GGUFFile, ModelConfig]:
    try:
        model = resolve(name, progress=progress)
        gguf = open_gguf(model.path)
        config = read_config(gguf)
    except (ModelError, GGUFError, ConfigError) as exc:
        raise PlanError(f"--spec draft:{name}: {exc}") from None
    if config.delta_net is not None:
        raise PlanError(f"--spec draft:{name}: it has recurrent layers, which cannot take guesses back")
    difference = vocabulary_difference(main, gguf)
    if difference:
        raise PlanError(f"--spec draft:{name}: its vocabulary is not the model's: {difference}")
    return model, gguf, config


def vocabulary_difference(main: GGUFFile, draft: GGUFFile) -> str:
    """What is different first between the vocabularies of two models; "" when token ids mean the same."""
    keys = ["tokenizer.ggml." + name for name in _SAME]
    for key in keys:
        ours, theirs = main.metadata.get(key), draft.metadata.get(key)
        if ours != theirs:
            return f"{key} is {theirs}, not {ours}"
    ours, theirs = (_tokens(gguf) for gguf in (main, draft))
    if len(ours) != len(theirs):
        return f"{len(theirs)} tokens, not {len(ours)}"
    different = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    return "" if different is None else f"token {different} is {theirs[different]!r}, not {ours[different]!r}"


def _tokens(gguf: GGUFFile) -> Sequence[object]:
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    return tokens if isinstance(tokens, Sequence) else ()


def _candidates(
    settings: Settings, choices: Sequence[DeviceChoice], offered: Sequence[DeviceInfo]
) -> list[DeviceChoice]:
    """Devices for the draft model, the best one first."""
    if settings.spec_device is not None:
        try:
            found = devices.choose((settings.spec_device,), settings.threads, offered)
        except DeviceError as exc:
            raise PlanError(str(exc).replace("--device", "--spec-device", 1)) from None
        if len(found) != 1:
            raise PlanError(f"--spec-device {settings.spec_device}: these are {len(found)} devices; name one")
        return list(found)
    near = [c for c in choices if not (c.spec.worker or c.spec.endpoint)]
    ordered = sorted(near, key=lambda c: _KINDS.index(c.device.kind))
    if any(c.device.kind == "cpu" for c in ordered):
        return ordered
    return [*ordered, *devices.choose(("CPU",), settings.threads, offered)]


def _plan(
    settings: Settings,
    model: ResolvedModel,
    gguf: GGUFFile,
    config: ModelConfig,
    choice: DeviceChoice,
    main: Planned,
) -> DraftPlan:
    context = min(main.plan.max_model_len, config.n_ctx_train)
    tokens = min(main.plan.kv_tokens, settings.max_num_seqs * context)
    own = replace(
        settings,
        model=str(model.path),
        device=(),
        split=(),
        ctx=context,
        kv_memory=0,
        kv_tokens=max(tokens, context),
        kv_type=F16,
        ram_cache=OFF,
        pipeline_depth=1,
        spec="off",
        spec_device=None,
    )
    planned = plan_model(gguf, config, [choice], own, _never, lambda text, done: None, GUESSED)
    return DraftPlan(model, gguf, config, own, choice, planned)


def _never(choice: DeviceChoice, spec: StageSpec) -> StageBackend:
    raise AssertionError("a single device is not measured")
