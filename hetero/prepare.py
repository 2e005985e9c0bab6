"""From settings to a plan: everything that can fail for a reason the user can mend.

It takes well under a second where no device has to be measured: nothing large is read. hetero/launch.py
loads what was planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from backends.base import DeviceInfo, StageBackend, StageLost
from backends.ggml.lib import GgmlError
from backends.ggml.models import ModelConfig, NotNative, read_config
from backends.ggml.models import ModelError as ConfigError
from backends.llama.config import LlamaConfig, read_llama_config
from backends.llama.library import knows
from hetero.models import ModelError, ResolvedModel, resolve
from hetero.plan import devices
from hetero.plan.draft import DraftPlan, main_memory_bytes, plan_with_draft
from hetero.plan.fallback import arrange, no_host_memory, plan_fallback
from hetero.plan.forecast import Forecast
from hetero.plan.host import free_memory
from hetero.plan.host_memory import HostPlan, explain_short, plan_host
from hetero.plan.make import GUESSED, MISSING, PlanError, Planned, plan_model
from hetero.plan.planner import ModelFacts, Plan, explain_shortage
from hetero.screen import ProgressCallback
from hetero.settings import Settings
from quant.gguf import GGUFError, GGUFFile, open_gguf

if TYPE_CHECKING:
    from backends.ggml.stage import StageSpec
    from hetero.plan.calibrate import OpenStage
    from hetero.plan.times import DeviceTimes


class LaunchError(Exception):
    """The model cannot be served with these settings: one line for the user."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known of a model before it is loaded."""

    model: ResolvedModel
    gguf: GGUFFile
    config: ModelConfig | LlamaConfig
    choices: tuple[devices.DeviceChoice, ...]
    facts: ModelFacts
    plan: Plan
    forecast: Forecast | None
    host: HostPlan
    draft: DraftPlan | None = None

    @property
    def choice(self) -> devices.DeviceChoice:
        return self.choices[0]

    @property
    def native(self) -> ModelConfig | None:
        """The model's configuration if graphs of ours compute it."""
        return None if isinstance(self.config, LlamaConfig) else self.config

    @property
    def llama(self) -> LlamaConfig | None:
        """The model's configuration if libllama computes it."""
        return self.config if isinstance(self.config, LlamaConfig) else None


def list_devices() -> list[DeviceInfo]:
    """The devices of this machine. Raises LaunchError when ggml cannot be loaded."""
    try:
        return devices.list_devices()
    except GgmlError as exc:
        raise LaunchError(str(exc)) from exc


def prepare(
    settings: Settings, progress: ProgressCallback = lambda text, done: None, measure: str | None = None
) -> Prepared:
    """Find the model, read its header, choose the devices and plan what goes where. Raises LaunchError.

    `measure` says how the speed of several devices is found, see plan_model; None: measured where nothing
    is known of it and --split does not say how the layers are split. A plan that does not fit
    is returned, not raised: see require_fit.
    """
    measure = measure or (GUESSED if settings.split else MISSING)
    with _explained():
        model = resolve(settings.model, progress=progress)
        gguf = open_gguf(model.path)
        config = _read_config(gguf, settings)
        there = list_devices()
        choices = devices.choose(settings.device, settings.threads, there)
        if isinstance(config, LlamaConfig):
            choices, settings = arrange(config, choices, settings)

        def plan_on(choices: Sequence[devices.DeviceChoice]) -> Planned:
            if isinstance(config, LlamaConfig):
                return plan_fallback(gguf, config, choices, settings)
            opener = _opener(model.path, gguf, config, settings)
            return plan_model(gguf, config, choices, settings, opener, progress, measure)

        draft, choices, planned = plan_with_draft(settings, gguf, choices, there, plan_on, progress)
    facts, plan = planned.facts, planned.plan
    plan = replace(plan, notes=(*plan.notes, *devices.crowded(choices)))
    if isinstance(config, LlamaConfig):
        host = no_host_memory(plan)
    else:
        free = free_memory() - main_memory_bytes(draft)
        host = plan_host(settings.ram_cache, facts, plan, choices, free, settings.disk_cache is not None)
    return Prepared(model, gguf, config, choices, facts, plan, planned.forecast, host, draft)


def measure_devices(settings: Settings, progress: ProgressCallback) -> list[tuple[str, DeviceTimes]]:
    """Time the model's layers anew on each device of --device, else on all. Raises LaunchError."""
    from hetero.plan.make import calibrate_model

    every = settings.device or tuple(device.name for device in devices.offered(list_devices()))
    with _explained():
        model = resolve(settings.model, progress=progress)
        gguf = open_gguf(model.path)
        config = _read_config(gguf, settings)
        if isinstance(config, LlamaConfig):
            raise PlanError(f"{model.path.name}: libllama computes it, and its layers cannot be timed")
        choices = devices.choose(every, settings.threads, list_devices())
        opener = _opener(model.path, gguf, config, settings)
        times = calibrate_model(gguf, config, choices, settings, opener, progress)
    return [(choice.label, t) for choice, t in zip(choices, times, strict=True)]


def _read_config(gguf: GGUFFile, settings: Settings) -> ModelConfig | LlamaConfig:
    """For a graph of ours where there is one for the family, else for libllama."""
    if settings.engine == "llama":
        return _for_libllama(gguf)
    try:
        return read_config(gguf)
    except NotNative:
        return _for_libllama(gguf)
    except ConfigError as exc:
        remedy = "download the file again, or let libllama try it with --engine llama"
        raise ConfigError(f"{exc}; {remedy}") from None


def _for_libllama(gguf: GGUFFile) -> LlamaConfig:
    config = read_llama_config(gguf)
    if not knows(gguf.architecture):
        raise ConfigError(
            f"{gguf.path.name}: model family {gguf.architecture!r} is known neither to hetero nor to its "
            "libllama; a newer hetero may know it, or take another model"
        )
    return config


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
