"""Times of devices, measured once and kept in the cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import platformdirs

from backends.ggml.lib import ggml, library_folder
from hetero import __version__
from hetero.plan.calibrate import Subject, calibrate, shares_memory
from hetero.plan.devices import DeviceChoice
from hetero.plan.facts import EMBEDDING, HEAD, layer_names
from hetero.plan.times import DeviceTimes, times_from_json
from hetero.screen import ProgressCallback


def cached_times(subject: Subject, choices: Sequence[DeviceChoice]) -> tuple[DeviceTimes | None, ...]:
    """What earlier calibrations of these devices with such layers found; None where there are none."""
    return tuple(_read(_path(subject, choices, i)) for i in range(len(choices)))


def measured_times(
    subject: Subject, choices: Sequence[DeviceChoice], progress: ProgressCallback, again: bool = False
) -> tuple[DeviceTimes, ...]:
    """The times of each device, measured now where they are not known, or `again`.

    CPU devices of this machine are measured together. Raises what opening and running stages raises.
    """
    known: list[DeviceTimes | None] = [None] * len(choices)
    if not again:
        known = list(cached_times(subject, choices))
    missing = [i for i, times in enumerate(known) if times is None]
    if any(shares_memory(choices[i]) for i in missing):
        missing = [i for i, c in enumerate(choices) if i in missing or shares_memory(c)]
    if missing:
        found = calibrate(subject, [choices[i] for i in missing], progress)
        for i, times in zip(missing, found, strict=True):
            known[i] = times
            _write(_path(subject, choices, i), times)
    return tuple(times for times in known if times is not None)


def _path(subject: Subject, choices: Sequence[DeviceChoice], index: int) -> Path:
    """A file named by all that the times of a device depend on."""
    choice = choices[index]
    beside = [c.threads for c in choices if shares_memory(c)] if shares_memory(choice) else []
    device, spec = choice.device, choice.spec
    names = (device.backend, device.device_id, device.description, spec.name, spec.endpoint, spec.worker)
    kept = str(subject.types_on(choice))
    depends = [*names, spec.threads, spec.cores, beside, kept, __version__, *_ggml(), *_shapes(subject)]
    digest = hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:24]
    base = os.environ.get("HETERO_CACHE_DIR") or platformdirs.user_cache_dir("hetero")
    return Path(base).expanduser() / "calibration" / f"{digest}.json"


def _ggml() -> tuple[str, str]:
    return ggml().version().decode(), str(library_folder())


def _shapes(subject: Subject) -> list:
    """The layers' classes with their tensors, and the matrices at the ends."""
    gguf, config = subject.gguf, subject.config
    classes = subject.classes
    examples = [classes.index(kind) for kind in range(max(classes) + 1)]
    names = [n for layer in examples for n in layer_names(config, layer)]
    names += [n for n in (EMBEDDING, HEAD) if n in gguf.tensors]
    tensors = [(gguf.tensors[n].type, gguf.tensors[n].shape) for n in names]
    windows = [config.layer_windows[layer] for layer in examples]
    heads = (config.n_head, *(config.heads_of(layer) for layer in examples))
    return [gguf.architecture, classes, tensors, windows, heads, subject.chunk_tokens, subject.host_experts]


def _read(path: Path) -> DeviceTimes | None:
    try:
        return times_from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, times: DeviceTimes) -> None:
    """Beside it, then in its place: a reader never sees half a file. A read-only cache is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_text(json.dumps(times.as_json()), encoding="utf-8")
        beside.replace(path)


__all__ = ["cached_times", "measured_times"]
