"""The models that are there to be served by name, and what this machine could do with each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hetero.model_folder import ModelError, models_below, models_folder, models_in
from hetero.settings import Settings

NATIVE, FALLBACK, NONE = "native", "fallback", "none"


@dataclass(frozen=True, slots=True)
class Entry:
    """A model. `engine`: whether our own graphs compute it, libllama does, or nothing can.

    `fits`: whether it would be served with the settings, None where that is not known; `note` says why not.
    `family` is "" and the numbers are 0 where the file cannot be read.
    """

    name: str
    path: str
    family: str = ""
    n_params: int = 0
    size_bytes: int = 0
    quantization: str = ""
    context: int = 0
    engine: str = NONE
    fits: bool | None = None
    note: str = ""


def native_families() -> list[tuple[str, str]]:
    """(family, the models that are of it) of each that our own graphs compute."""
    from backends.ggml.models.families import FAMILIES

    return [(family.architecture, family.models) for family in FAMILIES.values()]


def list_models(settings: Settings) -> list[Entry]:
    """Every model of the model folder and the packaged one, by name."""
    return [describe(name, path, settings) for name, path in sorted(_found())]


def _found() -> Iterator[tuple[str, Path]]:
    from hetero.models import resolve

    folder = models_folder()
    for name, files in (*models_in(folder).items(), *models_below(folder)):
        yield name, files[0]
    try:
        packaged = resolve(None)
    except ModelError:
        return
    yield packaged.name, packaged.path


def describe(name: str, path: Path, settings: Settings) -> Entry:
    """What there is to say of one file. An unreadable one is an entry too."""
    from hetero.plan.facts import count_parameters, quantization
    from quant.gguf import GGUFError, open_gguf

    entry = Entry(name, str(path))
    try:
        gguf = open_gguf(path)
    except GGUFError as exc:
        return replace(entry, note=f"unreadable: {str(exc).removeprefix(f'{path}: ')}")
    with gguf:
        family = gguf.architecture
        context = gguf.metadata.get(f"{family}.context_length")
        entry = replace(
            entry,
            family=family,
            n_params=count_parameters(gguf),
            size_bytes=gguf.nbytes,
            quantization=quantization(gguf),
            context=context if isinstance(context, int) else 0,
        )
    return _planned(entry, settings)


def _planned(entry: Entry, settings: Settings) -> Entry:
    """The entry with whether it fits, as `hetero serve` would find."""
    from hetero.plan.make import GUESSED
    from hetero.prepare import LaunchError, prepare, require_fit

    spec = settings.spec_ngrams  # a draft model is for one model
    try:
        prepared = prepare(replace(settings, model=entry.path, spec=spec), measure=GUESSED)
    except LaunchError as exc:
        return replace(entry, note=str(exc))
    entry = replace(entry, engine=FALLBACK if prepared.llama else NATIVE)
    with prepared.gguf:
        try:
            require_fit(prepared)
        except LaunchError as exc:
            return replace(entry, fits=False, note=str(exc))
    return replace(entry, fits=True)
