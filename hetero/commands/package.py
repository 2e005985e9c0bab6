"""`hetero package`: one executable with settings and a model inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hetero import inside
from hetero.commands.inspect import fail
from hetero.config import SettingError, load, read_config_file
from hetero.models import ModelError, ResolvedModel, resolve
from hetero.screen import loading
from hetero.settings import SPECS
from hetero.sizes import format_size
from quant.gguf import GGUFError, open_gguf
from quant.one_file import ALIGNMENT, Contents, ModelSpan, contents_of

PIECE = 8 << 20
ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "pyinstaller.py"


class PackageError(Exception):
    """The executable cannot be made: one line."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for. `base` None: this program, or a new build of the checkout it runs from."""

    out: Path
    model: str | None
    config: Path | None
    base: Path | None
    force: bool


def package(request: Request) -> int:
    """Make the executable. Exit code 1, and one line, on failure."""
    try:
        if request.out.exists() and not request.force:
            raise PackageError(f"{request.out}: exists; --force replaces it")
        settings = packaged_settings(request.config, request.model is not None)
        base = _base(request.base)
        with loading() as progress:
            model = None if request.model is None else resolve(request.model, progress=progress)
            write(base, request.out, settings, model, lambda done: progress("writing the executable", done))
    except (PackageError, SettingError, ModelError, GGUFError) as exc:
        return fail(exc)
    except OSError as exc:
        return fail(PackageError(f"{exc.filename or request.out}: {exc.strerror or exc}"))
    size = format_size(request.out.stat().st_size)
    print(f"{request.out}: {size}; {'serves its model' if model else 'needs to be told a model'}")
    return 0


def packaged_settings(config: Path | None, has_model: bool) -> dict[str, Any]:
    """The settings of a file, checked. Raises SettingError for one that must not be given away."""
    if config is None:
        return {}
    load({}, {}, config)
    table = read_config_file(config)
    for name in table:
        if SPECS[name].metadata.get("secret"):
            raise SettingError(
                f"{name} in {config}: everybody who has the executable could read it; "
                f"give it where the executable runs, as HETERO_{name.upper()}"
            )
    if has_model:
        table.pop("model", None)
    return table


def write(
    base: Path,
    out: Path,
    settings: dict[str, Any],
    model: ResolvedModel | None,
    progress: Callable[[float], None] = lambda done: None,
) -> None:
    """`base` with settings and a model in place of those that it has, as `out`.

    The file appears when it is whole. Raises PackageError, GGUFError and OSError.
    """
    contents = _contents(base)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as target:
            _write(base, contents, target, settings, model, progress)
            target.flush()
            os.fsync(target.fileno())
        part.chmod(0o755)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def _write(
    base: Path,
    contents: Contents,
    target: BinaryIO,
    settings: dict[str, Any],
    model: ResolvedModel | None,
    progress: Callable[[float], None],
) -> None:
    old = contents.footer
    program = old.app_offset + old.app_size
    source, start, size = _model_bytes(model) if model else (base, 0, 0)
    total, done = program + size, 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done / total)

    _copy(base, 0, program, target, count)
    index: dict[str, Any] = {"settings": settings} if settings else {}
    if model is not None:
        target.write(bytes(-program % ALIGNMENT))
        index["model"] = ModelSpan(model.name, target.tell(), size)._asdict()
        _copy(source, start, size, target, count)
    end, words = target.tell(), json.dumps(index, sort_keys=True).encode() if index else b""
    target.write(words)
    target.write(old._replace(index_offset=end, index_size=len(words)).packed())


def _model_bytes(model: ResolvedModel) -> tuple[Path, int, int]:
    """The file, and where in it the GGUF begins and how long it is."""
    with open_gguf(model.path) as gguf:
        if len(gguf.paths) > 1:
            raise PackageError(
                f"{model.path}: {len(gguf.paths)} files; join them first (llama-gguf-split --merge)"
            )
        size = gguf.nbytes
    held = contents_of(model.path)
    start = held.model.offset if held and held.model else 0
    return model.path, start, size


def _copy(source: Path, start: int, size: int, target: BinaryIO, count: Callable[[int], None]) -> None:
    with source.open("rb") as file:
        file.seek(start)
        while size:
            piece = file.read(min(PIECE, size))
            if not piece:
                raise PackageError(f"{source}: has become shorter")
            target.write(piece)
            size -= len(piece)
            count(len(piece))


def _base(given: Path | None) -> Path:
    """The executable to start from."""
    if given is not None:
        return given
    if inside.is_executable():
        return inside.own_file()
    if not BUILD.exists():
        raise PackageError(
            "name an executable to start from with --base; `make binary` in a checkout builds one"
        )
    out = ROOT / "dist" / "hetero"
    print("building the executable; the first time this takes minutes", file=sys.stderr)
    if subprocess.run([sys.executable, str(BUILD), "--out", str(out)], check=False).returncode:
        raise PackageError("the executable could not be built; see above")
    return out


def _contents(base: Path) -> Contents:
    if sys.platform != "linux":
        raise PackageError("settings and models can be put into executables of Linux alone")
    contents = contents_of(base)
    if contents is None:
        raise PackageError(f"{base}: not an executable of `make binary`")
    return contents


__all__ = ["PackageError", "Request", "package", "packaged_settings", "write"]
