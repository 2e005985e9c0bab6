"""The folder that models are looked for in by name: `hetero/models` in the user's data folder.

A name is a file's, without .gguf and the number of a split model's part; the file may also lie in a folder
of the model folder, where `hetero pull` puts it. Names never lead out of the model folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from quant.split import parse_part_name

_MAX_NAME = 200
# Windows opens a device for these, whatever the folder and the extension.
_RESERVED = {"CON", "PRN", "AUX", "NUL"} | {f"{port}{i}" for port in ("COM", "LPT") for i in range(10)}


class ModelError(ValueError):
    """MODEL cannot be used: one line that says why."""


def models_folder() -> Path:
    """HETERO_MODELS, else `hetero/models` in the user's data folder."""
    folder = os.environ.get("HETERO_MODELS")
    if folder:
        return Path(folder)
    import platformdirs

    return Path(platformdirs.user_data_dir("hetero", appauthor=False)) / "models"


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

    All inside `folder` or one of its folders, else None. What a symlink would take out of `folder` counts as
    absent. Raises ModelError when several folders have a model of the name.
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
            file = only_model(candidate)
            return file if _inside(file, folder) else None
    below = [files[0] for found, files in models_below(folder) if found == name]
    if len(below) > 1:
        places = ", ".join(str(file.parent) for file in below)
        raise ModelError(f"{name}: several folders have a model of this name ({places}); give its path")
    return below[0] if below else None


def list_names(folder: Path) -> list[str]:
    """Names that resolve_name() finds in `folder`, sorted."""
    return sorted({name for name, _ in (*models_in(folder).items(), *models_below(folder))})


def models_in(folder: Path, root: Path | None = None) -> dict[str, list[Path]]:
    """The files of each model directly inside `folder` by its name, parts in order.

    None that a symlink takes out of `root` (default: `folder`).
    """
    models: dict[str, list[Path]] = {}
    for file in (entry for entry in _entries(folder) if entry.suffix.lower() == ".gguf"):
        name = model_name(file)
        if is_safe_name(name) and file.is_file() and _inside(file, root or folder):
            models.setdefault(name, []).append(file)
    return models


def models_below(folder: Path) -> list[tuple[str, list[Path]]]:
    """(name, files) of each model in the folders inside `folder`."""
    below = [entry for entry in _entries(folder) if entry.is_dir() and is_safe_name(entry.name)]
    return [model for entry in below if _inside(entry, folder) for model in models_in(entry, folder).items()]


def model_name(path: Path) -> str:
    """The name of a file without its extension and its number in a split model."""
    part = parse_part_name(path.name)
    if part is not None:
        return part.name
    return path.stem if path.suffix.lower() == ".gguf" else path.name


def only_model(folder: Path) -> Path:
    """The (first) file of the one model directly inside `folder`. Raises ModelError for none or several."""
    files = [f for f in sorted(folder.iterdir()) if f.suffix.lower() == ".gguf" and f.is_file()]
    names = list(dict.fromkeys(map(model_name, files)))
    if len(names) != 1:
        several = f" ({', '.join(names[:8])}); name the file" if names else ""
        raise ModelError(
            f"{folder}: the folder must hold exactly one .gguf file or split model, not {len(names)}{several}"
        )
    return files[0]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve(strict=True).is_relative_to(folder.resolve(strict=True))
    except OSError:
        return False
