"""From a plan to a running engine: the slow part of a start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from backends.base import StageBackend, StageLost
from backends.ggml.lib import GgmlError
from backends.ggml.models import ModelError as ConfigError
from backends.llama.config import LlamaConfig
from hetero.files import unreadable
from hetero.plan.facts import count_parameters, quantization
from hetero.plan.planner import BLOCK_SIZE, StagePlan
from hetero.prepare import LaunchError, Prepared, prepare, require_fit
from hetero.screen import Placement, ProgressCallback, showing_compilation
from hetero.settings import Settings
from quant.gguf import GGUFFile

if TYPE_CHECKING:
    from backends.cpu.observe import ObservingStage
    from backends.ggml.stage import StageSpec
    from hetero.about import About
    from hetero.async_engine import AsyncEngine, ModelInfo
    from hetero.draft_model import DraftModel
    from hetero.kv.disk_folder import DiskFolder
    from hetero.kv.groups import KVGroup
    from hetero.pipeline.runner import Runner
    from hetero.speculation import Speculation
    from hetero.text.template import ChatTemplate
    from hetero.text.tokenizer import Tokenizer


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
    from hetero.kv.uncached import UncachedKV
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
            once.submit(_run_once, runner, plan.groups, draft and draft[0]).result()
        if draft is not None and speculation is not None:
            speculation.draft_with(draft[0])
        show("ready", 1.0)
    host = HostTier(prepared.host.slots, prepared.host.block_bytes)
    llama = prepared.llama
    kind = KVManager if llama is None or llama.keeps_prefixes else UncachedKV
    kv = kind(plan.groups, BLOCK_SIZE, _attended_in_place(prepared, runner.depth), host)
    if disk is not None:
        kv.below = open_disk(disk, kv, runner)
    seqs, tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    scheduler = Scheduler(kv, seqs, tokens, plan.max_model_len, runner.depth)
    engine = Engine(tokenizer, scheduler, runner, sampler, BLOCK_SIZE, speculation=speculation)
    grammars, by_client = GrammarCompiler(tokenizer), settings.cache_scope == "key"
    places = _placements(prepared, stages, draft and draft[1])
    info = _model_info(prepared, settings, scheduler.max_model_len, template is not None, places)
    return AsyncEngine(engine, tokenizer, template, grammars, info, by_client), places


def _speculation(prepared: Prepared, settings: Settings, tokenizer: Tokenizer) -> Speculation | None:
    from hetero.proposers import ProposersError, open_speculation

    if prepared.llama is not None and not prepared.llama.keeps_prefixes:
        return None  # a guess could not be taken back
    try:
        few = _attended_in_place(prepared, 1) > 0
        return open_speculation(settings, tokenizer, prepared.gguf, prepared.config.n_vocab, few)
    except ProposersError as exc:
        raise LaunchError(str(exc)) from exc


def _disk_folder(prepared: Prepared, settings: Settings) -> DiskFolder | None:
    """Before anything is loaded: whether the folder of --disk-cache can be used."""
    from hetero.kv.open_disk import DiskCacheError, open_folder

    if settings.disk_cache is None or prepared.facts.recurrent:  # the plan says why
        return None
    try:
        return open_folder(settings.disk_cache, prepared)
    except DiskCacheError as exc:
        raise LaunchError(str(exc)) from exc


def _attended_in_place(prepared: Prepared, depth: int) -> int:
    from hetero.pipeline.opening import attended_in_place

    if prepared.llama is not None:
        return 0
    return attended_in_place([prepared.choices[stage.index] for stage in prepared.plan.stages], depth)


def open_runner(prepared: Prepared, settings: Settings, progress: ProgressCallback) -> Runner:
    """The loaded stages alone, run once, for commands that want logits. Raises LaunchError.

    All its steps must come from the calling thread (see load).
    """
    import backends.cpu.jit  # noqa: F401  first of all numba code, as in load
    from hetero.pipeline.runner import Runner

    with showing_compilation(progress) as show:
        runner = Runner(open_stages(prepared, settings, show))
        _run_once(runner, prepared.plan.groups)
    return runner


def open_observer(
    prepared: Prepared, settings: Settings, progress: ProgressCallback
) -> tuple[Runner, ObservingStage]:
    """The same with a stage that sums up what enters its matrices, from the first step on."""
    import backends.cpu.jit  # noqa: F401  first of all numba code, as in load
    from backends.cpu.observe import ObservingStage
    from backends.ggml.devices import open_device
    from hetero.pipeline.runner import Runner

    assert prepared.native is not None, "the caller asked"
    with showing_compilation(progress) as show, _device_errors():
        (spec,) = _stage_specs(prepared, settings, 1)
        device, count = open_device(prepared.choice.spec), _counter(prepared, show)
        stage = ObservingStage(prepared.gguf, prepared.native, device, spec, count)
    return Runner([stage]), stage


def _chat_template(settings: Settings, gguf: GGUFFile, tokenizer: Tokenizer) -> ChatTemplate | None:
    from hetero.text.template import ChatTemplate

    if settings.chat_template is None:
        return ChatTemplate.from_gguf(gguf, tokenizer)
    try:
        source = Path(settings.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise LaunchError(f"--chat-template {settings.chat_template}: {unreadable(exc)}") from None
    template = ChatTemplate.of(source, tokenizer)
    if template.error:
        raise LaunchError(f"--chat-template {settings.chat_template}: {template.error}")
    return template


def open_stages(prepared: Prepared, settings: Settings, progress: ProgressCallback) -> list[StageBackend]:
    """The stages of the plan, weights and KV pools in place. Raises LaunchError, and leaves nothing open.

    With libllama it is one, whatever devices the plan has.
    """
    from hetero.pipeline.opening import StageOpener

    if prepared.llama is not None:
        return [_open_llama(prepared, prepared.llama, settings, progress)]
    assert prepared.native is not None
    share = settings.disk_cache is not None  # what goes to the disk has to be seen from here
    opener = StageOpener(prepared.model.path, prepared.gguf, prepared.native, settings.isolate, share)
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


def _open_llama(
    prepared: Prepared, config: LlamaConfig, settings: Settings, progress: ProgressCallback
) -> StageBackend:
    from hetero.pipeline.opening import open_llama
    from hetero.plan.fallback import llama_spec

    spec = replace(_stage_specs(prepared, settings, 1)[0], first=0, last=config.n_layer)
    held = llama_spec(prepared.plan, config, prepared.choices, settings)
    count = _counter(prepared, progress)
    with _device_errors():
        return open_llama(prepared.gguf, config, spec, held, settings.isolate, count)


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
            host_experts=plan.host_experts,
            host_threads=settings.threads,
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


def _run_once(runner: Runner, groups: Sequence[KVGroup], draft: DraftModel | None = None) -> None:
    from hetero.pipeline.opening import run_once

    try:
        run_once(runner, groups)
        if draft is not None:
            draft.warm_up()
    except Exception as exc:  # whatever a device can say
        raise LaunchError(f"the first step failed: {exc}") from exc


def _placements(
    prepared: Prepared, stages: Sequence[StageBackend], draft: StageBackend | None
) -> tuple[Placement, ...]:
    """Where the memory of the model's stages went, and of the draft model's."""
    planned = prepared.plan.stages
    if prepared.llama is not None:  # what is on which of its devices, libllama does not tell
        name = ", ".join(p.device for p in planned)
        planned = (replace(planned[0], device=f"{name} (libllama)", layers=(0, prepared.llama.n_layer)),)
    threads = [prepared.choices[p.index].threads for p in planned]
    placed = [
        _placement(plan.what, plan, stage, count)
        for plan, stage, count in zip(planned, stages, threads, strict=True)
    ]
    if prepared.plan.host_experts:
        held = sum(stage.memory()["experts"] for stage in stages)
        placed.append(Placement("main memory", f"experts of {prepared.plan.host_experts} layers", held, 0, 0))
    if draft is not None and prepared.draft is not None:
        name = prepared.draft.model.name
        count = prepared.draft.choice.threads
        placed.append(_placement(f"draft model {name}", prepared.draft.stage, draft, count))
    return tuple(placed)


def _placement(what: str, planned: StagePlan, stage: StageBackend, threads: int) -> Placement:
    held = stage.memory()
    return Placement(planned.device, what, held["weights"], held["kv"], held["compute"], threads)


def _model_info(
    prepared: Prepared, settings: Settings, n_ctx: int, has_template: bool, places: tuple[Placement, ...]
) -> ModelInfo:
    from hetero.async_engine import ModelInfo
    from hetero.embedding import pooling_of

    name = settings.model_name or prepared.model.name
    return ModelInfo(
        name=name.encode("utf-8", "replace").decode(),  # a file may be called what no text can say
        architecture=prepared.gguf.architecture,
        n_ctx=n_ctx,
        n_vocab=prepared.config.n_vocab,
        kv_tokens=prepared.plan.kv_tokens,
        max_num_seqs=settings.max_num_seqs,
        n_params=count_parameters(prepared.gguf),
        size_bytes=prepared.gguf.nbytes,
        quantization=quantization(prepared.gguf),
        created=int(prepared.model.path.stat().st_mtime),
        has_chat_template=has_template,
        n_embd=prepared.config.n_embd,
        pooling=pooling_of(prepared.gguf.metadata) if prepared.llama is None else None,
        placements=places,
        notes=prepared.plan.notes,
        about=_about(prepared, settings),
    )


def _about(prepared: Prepared, settings: Settings) -> About:
    from hetero.about import About, shown_settings
    from hetero.kv.fingerprint import model_digest
    from hetero.plan.versions import versions

    used = [prepared.choices[stage.index] for stage in prepared.plan.stages]
    devices = tuple(
        {
            "name": choice.label,
            "kind": choice.device.kind,
            "description": choice.device.description,
            "backend": choice.device.backend,
            "memory_bytes": choice.device.total_bytes,
            "threads": choice.threads,
        }
        for choice in used
    )
    return About(model_digest(prepared.gguf).hex(), versions(), devices, shown_settings(settings))
