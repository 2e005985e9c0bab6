"""From settings to a running engine.

`prepare` does everything that can fail for a reason the user can mend, in well under a second:
nothing large is read. `load` then does the slow part. `launch` is both.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from backends.base import DeviceInfo
from backends.ggml.lib import GgmlError
from backends.ggml.models.config import ModelConfig, read_config
from backends.ggml.models.config import ModelError as ConfigError
from hetero.batch import Batch
from hetero.config import Settings
from hetero.models import ModelError, ResolvedModel, resolve
from hetero.plan import devices
from hetero.plan.facts import count_parameters, model_facts, quantization
from hetero.plan.planner import BLOCK_SIZE, Limits, ModelFacts, Plan, explain_shortage, make_plan
from hetero.screen import Placement, ProgressCallback
from quant.gguf import GGUFError, GGUFFile, open_gguf

if TYPE_CHECKING:
    from backends.cpu.observe import ObservingStage
    from backends.ggml.stage import GgmlStage
    from hetero.async_engine import AsyncEngine, ModelInfo
    from hetero.pipeline.runner import Runner
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
    choice: devices.DeviceChoice
    facts: ModelFacts
    plan: Plan


def list_devices() -> list[DeviceInfo]:
    """The devices of this machine. Raises LaunchError when ggml cannot be loaded."""
    try:
        return devices.list_devices()
    except GgmlError as exc:
        raise LaunchError(str(exc)) from exc


def prepare(settings: Settings) -> Prepared:
    """Find the model, read its header, choose the device and plan its memory. Raises LaunchError.

    A plan that does not fit is returned, not raised: see require_fit.
    """
    try:
        model = resolve(settings.model)
        gguf = open_gguf(model.path)
        config = read_config(gguf)
        choice = devices.choose(settings.device, settings.threads, list_devices())
    except (ModelError, GGUFError, ConfigError, devices.DeviceError) as exc:
        raise LaunchError(str(exc)) from exc
    limits = Limits(
        settings.ctx,
        settings.kv_memory,
        settings.kv_tokens,
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
    )
    facts = model_facts(gguf, config, limits)
    plan = make_plan(facts, choice.device.name, choice.device.free_bytes, limits)
    return Prepared(model, gguf, config, choice, facts, plan)


def require_fit(prepared: Prepared) -> None:
    """Raise LaunchError with the missing bytes when the plan does not fit."""
    if not prepared.plan.fits:
        raise LaunchError(explain_shortage(prepared.plan, prepared.facts))


def launch(settings: Settings, progress: ProgressCallback) -> AsyncEngine:
    """A loaded engine, not yet started. Raises LaunchError."""
    prepared = prepare(settings)
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
    from hetero.kv.manager import KVManager
    from hetero.pipeline.runner import Runner
    from hetero.sampling.sampler import Sampler
    from hetero.scheduler import Scheduler
    from hetero.text.grammar import GrammarCompiler
    from hetero.text.tokenizer import Tokenizer

    plan = prepared.plan
    with _showing_compilation(progress) as show:
        try:
            tokenizer = Tokenizer(prepared.model.path)
        except ValueError as exc:  # its vocabulary is missing or of an unknown kind
            raise LaunchError(str(exc)) from exc
        template = _chat_template(settings, prepared.gguf, tokenizer)
        stage = open_stage(prepared, settings, show)
        show("preparing the sampler", 0.9)
        sampler = Sampler(prepared.config.n_vocab)
        sampler.warmup()
        show("running the model once", 0.95)
        runner = Runner([stage])
        # OpenMP keeps a team of workers for every living thread that has computed, and with two teams
        # lets threads sleep at each barrier (a step of one token: 6 ms instead of 2). So the warm-up
        # has a thread of its own, which is gone before the engine's starts.
        with ThreadPoolExecutor(1) as once:
            once.submit(_warm_up, runner, len(plan.groups)).result()
        show("ready", 1.0)
    scheduler = Scheduler(
        KVManager(plan.groups, BLOCK_SIZE),
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
        plan.max_model_len,
        runner.depth,
    )
    engine = Engine(tokenizer, scheduler, runner, sampler, BLOCK_SIZE)
    info = _model_info(prepared, settings, scheduler.max_model_len, template is not None)
    held = stage.memory()
    layers = f"layers 0 to {prepared.config.n_layer - 1}"
    place = Placement(prepared.choice.device.name, layers, held["weights"], held["kv"], held["compute"])
    return AsyncEngine(engine, tokenizer, template, GrammarCompiler(tokenizer), info), (place,)


def open_runner(prepared: Prepared, settings: Settings, progress: ProgressCallback) -> Runner:
    """The loaded stages alone, run once, for commands that want logits. Raises LaunchError.

    All its steps must come from the calling thread (see load).
    """
    import backends.cpu.jit  # noqa: F401  first of all numba code, as in load
    from hetero.pipeline.runner import Runner

    with _showing_compilation(progress) as show:
        runner = Runner([open_stage(prepared, settings, show)])
        _warm_up(runner, len(prepared.plan.groups))
    return runner


def open_observer(
    prepared: Prepared, settings: Settings, progress: ProgressCallback
) -> tuple[Runner, ObservingStage]:
    """The same with a stage that sums up what enters its matrices, from the first step on."""
    import backends.cpu.jit  # noqa: F401  first of all numba code, as in load
    from backends.cpu.observe import ObservingStage
    from hetero.pipeline.runner import Runner

    with _showing_compilation(progress) as show:
        stage = open_stage(prepared, settings, show, ObservingStage)
    assert isinstance(stage, ObservingStage)
    return Runner([stage]), stage


@contextmanager
def _showing_compilation(progress: ProgressCallback) -> Iterator[ProgressCallback]:
    """Hands phases on, and says so whenever numba compiles instead of loading what it compiled before."""
    from numba.core import event

    done = 0.0

    def show(text: str, fraction: float) -> None:
        nonlocal done
        done = fraction
        progress(text, fraction)

    class Compiling(event.Listener):
        def on_start(self, event: object) -> None:
            progress("compiling kernels for this CPU (first start only)", done)

        def on_end(self, event: object) -> None:
            pass

    with event.install_listener("numba:run_pass", Compiling()):
        yield show


def _chat_template(settings: Settings, gguf: GGUFFile, tokenizer: Tokenizer) -> ChatTemplate | None:
    from hetero.text.template import ChatTemplate

    if settings.chat_template is None:
        return ChatTemplate.from_gguf(gguf, tokenizer)
    try:
        source = Path(settings.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise LaunchError(f"--chat-template {settings.chat_template}: {exc}") from None
    bos, eos = (
        "" if token is None else tokenizer.token_text(token) for token in (tokenizer.bos_id, tokenizer.eos_id)
    )
    template = ChatTemplate(source, bos, eos, control_pattern=tokenizer.control_pattern)
    if template.error:
        raise LaunchError(f"--chat-template {settings.chat_template}: {template.error}")
    return template


def open_stage(
    prepared: Prepared, settings: Settings, progress: ProgressCallback, kind: type[GgmlStage] | None = None
) -> GgmlStage:
    """All layers on the chosen device, weights and KV pools in place; `kind` None is a plain stage.

    Raises LaunchError.
    """
    from backends.ggml.devices import DeviceError, open_device
    from backends.ggml.stage import GgmlStage, StageSpec

    plan, loaded = prepared.plan, 0

    def count(nbytes: int) -> None:
        nonlocal loaded
        loaded += nbytes
        share = min(1.0, loaded / max(1, prepared.facts.weight_bytes))
        progress("loading the weights", 0.1 + 0.8 * share)

    spec = StageSpec(
        first=0,
        last=prepared.config.n_layer,
        group_of={layer: g for g, group in enumerate(plan.groups) for layer in group.layers},
        num_blocks=tuple(group.num_blocks for group in plan.groups),
        max_tokens=settings.max_num_batched_tokens,
        max_logits=settings.max_num_seqs,
    )
    try:
        device = open_device(prepared.choice.device.name, prepared.choice.threads)
        return (kind or GgmlStage)(prepared.gguf, prepared.config, device, spec, count)
    except (GgmlError, DeviceError, ConfigError, MemoryError) as exc:
        raise LaunchError(str(exc)) from exc


def _warm_up(runner: Runner, num_groups: int) -> None:
    """Compute a chunk and a single token in the scratch block: what is slow once is then done."""
    for count in (BLOCK_SIZE, 1):
        batch = Batch(
            step_id=0,
            input_ids=np.zeros(count, np.int32),
            positions=np.arange(count, dtype=np.int32),
            slot_mapping=[np.arange(count, dtype=np.int32)] * num_groups,
            block_tables=[np.zeros((1, 1), np.int32)] * num_groups,
            context_lens=np.array([count], np.int32),
            cu_seqlens_q=np.array([0, count], np.int32),
            logits_rows=np.array([count - 1], np.int32),
            copies=[],
        )
        runner.submit(batch)
        result = runner.wait()
        if result is None or result.error is not None:
            raise LaunchError(f"the first step failed: {result and result.error}")


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
