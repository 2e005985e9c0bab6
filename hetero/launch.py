"""From settings to a running engine.

`prepare` does everything that can fail for a reason the user can mend, in well under a second:
nothing large is read. `load` then does the slow part. `launch` is both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from backends.base import DeviceInfo, StageBackend, StageLost
from backends.ggml.lib import GgmlError
from backends.ggml.models.config import ModelConfig, read_config
from backends.ggml.models.config import ModelError as ConfigError
from hetero.config import Settings
from hetero.models import ModelError, ResolvedModel, resolve
from hetero.plan import devices
from hetero.plan.draft import DraftPlan, main_memory_bytes, plan_with_draft
from hetero.plan.facts import count_parameters, quantization
from hetero.plan.forecast import Forecast
from hetero.plan.host import free_memory
from hetero.plan.host_memory import HostPlan, explain_short, plan_host
from hetero.plan.make import MISSING, PlanError, Planned, plan_model
from hetero.plan.planner import BLOCK_SIZE, ModelFacts, Plan, StagePlan, explain_shortage
from hetero.screen import Placement, ProgressCallback, showing_compilation
from quant.gguf import GGUFError, GGUFFile, open_gguf

if TYPE_CHECKING:
    from backends.cpu.observe import ObservingStage
    from backends.ggml.stage import StageSpec
    from hetero.async_engine import AsyncEngine, ModelInfo
    from hetero.draft_model import DraftModel
    from hetero.kv.disk_folder import DiskFolder
    from hetero.pipeline.runner import Runner
    from hetero.plan.calibrate import OpenStage
    from hetero.plan.times import DeviceTimes
    from hetero.speculation import Speculation
    from hetero.text.template import ChatTemplate
    from hetero.text.tokenizer import Tokenizer


class LaunchError(Exception):
    """The model cannot be served with these settings: one line for the user."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known of a model before it is loaded."""

    model: ResolvedModel
    gguf: GGUFFile
    config: ModelConfig
    choices: tuple[devices.DeviceChoice, ...]
    facts: ModelFacts
    plan: Plan
    forecast: Forecast | None
    host: HostPlan
    draft: DraftPlan | None = None

    @property
    def choice(self) -> devices.DeviceChoice:
        return self.choices[0]


def list_devices() -> list[DeviceInfo]:
    """The devices of this machine. Raises LaunchError when ggml cannot be loaded."""
    try:
        return devices.list_devices()
    except GgmlError as exc:
        raise LaunchError(str(exc)) from exc


def prepare(
    settings: Settings, progress: ProgressCallback = lambda text, done: None, measure: str = MISSING
) -> Prepared:
    """Find the model, read its header, choose the devices and plan what goes where. Raises LaunchError.

    `measure` says how the speed of several devices is found, see plan_model. A plan that does not fit
    is returned, not raised: see require_fit.
    """
    with _explained():
        model = resolve(settings.model)
        gguf = open_gguf(model.path)
        config = read_config(gguf)
        there = list_devices()
        choices = devices.choose(settings.device, settings.threads, there)
        opener = _opener(model.path, gguf, config, settings)

        def plan_on(choices: Sequence[devices.DeviceChoice]) -> Planned:
            return plan_model(gguf, config, choices, settings, opener, progress, measure)

        draft, choices, planned = plan_with_draft(settings, gguf, choices, there, plan_on)
    facts, plan = planned.facts, planned.plan
    free = free_memory() - main_memory_bytes(draft)
    host = plan_host(settings.ram_cache, facts, plan, choices, free, settings.disk_cache is not None)
    return Prepared(model, gguf, config, choices, facts, plan, planned.forecast, host, draft)


def measure_devices(settings: Settings, progress: ProgressCallback) -> list[tuple[str, DeviceTimes]]:
    """Time the model's layers anew on each device of --device, else on all. Raises LaunchError."""
    from hetero.plan.make import calibrate_model

    every = settings.device or tuple(device.name for device in devices.offered(list_devices()))
    with _explained():
        model = resolve(settings.model)
        gguf = open_gguf(model.path)
        config = read_config(gguf)
        choices = devices.choose(every, settings.threads, list_devices())
        opener = _opener(model.path, gguf, config, settings)
        times = calibrate_model(gguf, config, choices, settings, opener, progress)
    return [(choice.label, t) for choice, t in zip(choices, times, strict=True)]


@contextmanager
def _explained() -> Iterator[None]:
    """Errors in what the user asked for, and of devices that are measured, as LaunchError."""
    from backends.ggml.stage import StageError

    try:
        yield
    except (ModelError, GGUFError, ConfigError, devices.DeviceError, PlanError) as exc:
        raise LaunchError(str(exc)) from exc
    except (GgmlError, StageError, StageLost, MemoryError) as exc:
        raise LaunchError(f"measuring the devices failed: {exc}") from exc


def _opener(path: Path, gguf: GGUFFile, config: ModelConfig, settings: Settings) -> OpenStage:
    """Opens stages to be measured."""

    def opener(choice: devices.DeviceChoice, spec: StageSpec) -> StageBackend:
        from hetero.pipeline.opening import StageOpener

        return StageOpener(path, gguf, config, settings.isolate).open(choice, spec)

    return opener


def require_fit(prepared: Prepared) -> None:
    """Raise LaunchError with the missing bytes when the plan does not fit."""
    if not prepared.plan.fits:
        raise LaunchError(explain_shortage(prepared.plan))
    if prepared.host.short_by:
        raise LaunchError(explain_short(prepared.host))


def launch(settings: Settings, progress: ProgressCallback) -> AsyncEngine:
    """A loaded engine, not yet started. Raises LaunchError."""
    prepared = prepare(settings, progress)
    require_fit(prepared)
    return load(prepared, settings, progress)[0]


def load(
    prepared: Prepared, settings: Settings, progress: ProgressCallback
) -> tuple[AsyncEngine, tuple[Placement, ...]]:
    """Read the weights, build the stages and the engine over them, and run it once.

    Also returns where the memory went. Raises LaunchError.
    """
    progress("reading the vocabulary", 0.0)
    import backends.cpu.jit  # noqa: F401  first of all numba code: it says where compiled code is kept
    from hetero.async_engine import AsyncEngine
    from hetero.engine import Engine
    from hetero.kv.host_tier import HostTier
    from hetero.kv.manager import KVManager
    from hetero.kv.open_disk import open_disk
    from hetero.pipeline.draft import open_draft
    from hetero.pipeline.runner import Runner
    from hetero.sampling.sampler import Sampler
    from hetero.scheduler import Scheduler
    from hetero.text.grammar import GrammarCompiler
    from hetero.text.tokenizer import Tokenizer

    plan, disk = prepared.plan, _disk_folder(prepared, settings)
    with showing_compilation(progress) as show:
        try:
            tokenizer = Tokenizer(prepared.model.path)
        except ValueError as exc:  # its vocabulary is missing or of an unknown kind
            raise LaunchError(str(exc)) from exc
        template = _chat_template(settings, prepared.gguf, tokenizer)
        speculation = _speculation(prepared, settings, tokenizer)
        stages = open_stages(prepared, settings, show)
        show("preparing the sampler", 0.9)
        sampler = Sampler(prepared.config.n_vocab)
        sampler.warmup()
        show("running the model once", 0.95)
        runner = Runner(stages, settings.pipeline_depth)
        with _device_errors():
            draft = None if prepared.draft is None else open_draft(prepared.draft)
        # OpenMP keeps a team of workers for every living thread that has computed, and with two teams
        # lets threads sleep at each barrier (a step of one token: 6 ms instead of 2). So the warm-up
        # has a thread of its own, which is gone before the engine's starts.
        with ThreadPoolExecutor(1) as once:
            once.submit(_run_once, runner, len(plan.groups), draft and draft[0]).result()
        if draft is not None and speculation is not None:
            speculation.draft_with(draft[0])
        show("ready", 1.0)
    host = HostTier(prepared.host.slots, prepared.host.block_bytes)
    kv = KVManager(plan.groups, BLOCK_SIZE, _attended_in_place(prepared, runner.depth), host)
    if disk is not None:
        kv.below = open_disk(disk, kv, runner)
    seqs, tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    scheduler = Scheduler(kv, seqs, tokens, plan.max_model_len, runner.depth)
    engine = Engine(tokenizer, scheduler, runner, sampler, BLOCK_SIZE, speculation=speculation)
    info = _model_info(prepared, settings, scheduler.max_model_len, template is not None)
    grammars, by_client = GrammarCompiler(tokenizer), settings.cache_scope == "key"
    places = _placements(prepared, stages, draft and draft[1])
    return AsyncEngine(engine, tokenizer, template, grammars, info, by_client), places


def _speculation(prepared: Prepared, settings: Settings, tokenizer: Tokenizer) -> Speculation | None:
    from hetero.proposers import ProposersError, open_speculation

    try:
        few = _attended_in_place(prepared, 1) > 0
        return open_speculation(settings, tokenizer, prepared.gguf, prepared.config.n_vocab, few)
    except ProposersError as exc:
        raise LaunchError(str(exc)) from exc


def _disk_folder(prepared: Prepared, settings: Settings) -> DiskFolder | None:
    """Before anything is loaded: whether the folder of --disk-cache can be used."""
    from hetero.kv.open_disk import DiskCacheError, open_folder

    if settings.disk_cache is None:
        return None
    try:
        return open_folder(settings.disk_cache, prepared)
    except DiskCacheError as exc:
        raise LaunchError(str(exc)) from exc


def _attended_in_place(prepared: Prepared, depth: int) -> int:
    from hetero.pipeline.opening import attended_in_place

    return attended_in_place([prepared.choices[stage.index] for stage in prepared.plan.stages], depth)


def open_runner(prepared: Prepared, settings: Settings, progress: ProgressCallback) -> Runner:
    """The loaded stages alone, run once, for commands that want logits. Raises LaunchError.

    All its steps must come from the calling thread (see load).
    """
    import backends.cpu.jit  # noqa: F401  first of all numba code, as in load
    from hetero.pipeline.runner import Runner

    with showing_compilation(progress) as show:
        runner = Runner(open_stages(prepared, settings, show))
        _run_once(runner, len(prepared.plan.groups))
    return runner


def open_observer(
    prepared: Prepared, settings: Settings, progress: ProgressCallback
) -> tuple[Runner, ObservingStage]:
    """The same with a stage that sums up what enters its matrices, from the first step on."""
    import backends.cpu.jit  # noqa: F401  first of all numba code, as in load
    from backends.cpu.observe import ObservingStage
    from backends.ggml.devices import open_device
    from hetero.pipeline.runner import Runner

    with showing_compilation(progress) as show, _device_errors():
        (spec,) = _stage_specs(prepared, settings, 1)
        device, count = open_device(prepared.choice.spec), _counter(prepared, show)
        stage = ObservingStage(prepared.gguf, prepared.config, device, spec, count)
    return Runner([stage]), stage


def _chat_template(settings: Settings, gguf: GGUFFile, tokenizer: Tokenizer) -> ChatTemplate | None:
    from hetero.text.template import ChatTemplate

    if settings.chat_template is None:
        return ChatTemplate.from_gguf(gguf, tokenizer)
    try:
        source = Path(settings.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise LaunchError(f"--chat-template {settings.chat_template}: {exc}") from None
    template = ChatTemplate.of(source, tokenizer)
    if template.error:
        raise LaunchError(f"--chat-template {settings.chat_template}: {template.error}")
    return template


def open_stages(prepared: Prepared, settings: Settings, progress: ProgressCallback) -> list[StageBackend]:
    """The stages of the plan, weights and KV pools in place. Raises LaunchError, and leaves nothing open."""
    from hetero.pipeline.opening import StageOpener

    share = settings.disk_cache is not None  # what goes to the disk has to be seen from here
    opener = StageOpener(prepared.model.path, prepared.gguf, prepared.config, settings.isolate, share)
    depth = settings.pipeline_depth or len(prepared.plan.stages)
    specs = _stage_specs(prepared, settings, depth)
    count = _counter(prepared, progress)
    stages: list[StageBackend] = []
    try:
        with _device_errors():
            for planned, spec in zip(prepared.plan.stages, specs, strict=True):
                stages.append(opener.keep_open(prepared.choices[planned.index], spec, count))
    except BaseException:
        for stage in stages:
            stage.close()
        raise
    return stages


def _stage_specs(prepared: Prepared, settings: Settings, depth: int) -> list[StageSpec]:
    from hetero.pipeline.opening import stage_spec

    plan, tokens = prepared.plan, settings.max_num_batched_tokens
    rows = min(tokens, settings.max_num_seqs + settings.draft_rows)
    return [
        stage_spec(
            plan.groups,
            planned.layers,
            tokens,
            rows,
            depth,
            plan.max_model_len,
            types=planned.kv_types,
            host_slots=prepared.host.slots,
        )
        for planned in plan.stages
    ]


def _counter(prepared: Prepared, progress: ProgressCallback) -> Callable[[int], None]:
    """Takes the bytes of weights that were loaded since its last call, and shows the sum's share."""
    loaded = 0

    def count(nbytes: int) -> None:
        nonlocal loaded
        loaded += nbytes
        share = min(1.0, loaded / max(1, prepared.facts.weight_bytes))
        progress("loading the weights", 0.1 + 0.8 * share)

    return count


@contextmanager
def _device_errors() -> Iterator[None]:
    from backends.ggml.devices import DeviceError
    from hetero.worker.secret import SecretError

    try:
        yield
    except (GgmlError, DeviceError, ConfigError, StageLost, SecretError, MemoryError) as exc:
        raise LaunchError(str(exc)) from exc


def _run_once(runner: Runner, num_groups: int, draft: DraftModel | None = None) -> None:
    from hetero.pipeline.opening import run_once

    try:
        run_once(runner, num_groups)
        if draft is not None:
            draft.warm_up()
    except Exception as exc:  # whatever a device can say
        raise LaunchError(f"the first step failed: {exc}") from exc


def _placements(
    prepared: Prepared, stages: Sequence[StageBackend], draft: StageBackend | None
) -> tuple[Placement, ...]:
    """Where the memory of the model's stages went, and of the draft model's."""
    planned = prepared.plan.stages
    placed = [_placement(plan.what, plan, stage) for plan, stage in zip(planned, stages, strict=True)]
    if draft is not None and prepared.draft is not None:
        name = prepared.draft.model.name
        placed.append(_placement(f"draft model {name}", prepared.draft.stage, draft))
    return tuple(placed)


def _placement(what: str, planned: StagePlan, stage: StageBackend) -> Placement:
    held = stage.memory()
    return Placement(planned.device, what, held["weights"], held["kv"], held["compute"])


def _model_info(prepared: Prepared, settings: Settings, n_ctx: int, has_template: bool) -> ModelInfo:
    from hetero.async_engine import ModelInfo

    return ModelInfo(
        name=settings.model_name or prepared.model.name,
        architecture=prepared.gguf.architecture,
        n_ctx=n_ctx,
        n_vocab=prepared.config.n_vocab,
        kv_tokens=prepared.plan.kv_tokens,
        n_params=count_parameters(prepared.gguf),
        size_bytes=prepared.gguf.nbytes,
        quantization=quantization(prepared.gguf),
        created=int(prepared.model.path.stat().st_mtime),
        has_chat_template=has_template,
    )
