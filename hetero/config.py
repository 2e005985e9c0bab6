"""Settings of `hetero serve`: from flags, then HETERO_* variables, then hetero.toml, then defaults.

An executable may have settings inside (see `hetero package`); they stand in place of defaults.

`python -m hetero.config` prints the reference page docs/config.md.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero import inside
from hetero.files import unreadable
from hetero.kv_types import parse_kv_types
from hetero.settings import OFF, SPECS, FolderLimit, Settings, flag_name
from hetero.sizes import format_size, parse_size
from hetero.spec_setting import parse_spec

CONFIG_FILE = "hetero.toml"


class SettingError(ValueError):
    """A setting that cannot be used: one line that names it and where it came from."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings and, for each name, where its value came from."""

    settings: Settings
    sources: Mapping[str, str]


def load(
    flags: Mapping[str, Any], env: Mapping[str, str] | None = None, config_file: Path | None = None
) -> Loaded:
    """Settings from all sources. `flags` holds only what was given on the command line.

    `config_file` None looks for hetero.toml in the current folder, then in the user's configuration
    folder. Raises SettingError.
    """
    env = os.environ if env is None else env
    path = config_file or find_config_file()
    table = read_config_file(path) if path else {}
    packaged = inside.contents()
    own = packaged.settings if packaged else {}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, spec in SPECS.items():
        variable = "HETERO_" + name.upper()
        if name in flags:
            raw, source, origin = flags[name], flag_name(name), "command line"
        elif env.get(variable, "") != "":
            raw, source, origin = env[variable], variable, variable
            if spec.metadata["kind"] == "list":
                raw = [part.strip() for part in raw.split(",") if part.strip()]
        elif name in table:
            raw, source, origin = table[name], f"{name} in {path}", str(path)
        elif name in own:
            raw, source, origin = own[name], f"{name} inside the executable", "inside the executable"
        else:
            values[name], sources[name] = spec.default, "default"
            continue
        try:
            values[name] = _convert(spec, raw)
        except ValueError as exc:
            raise SettingError(f"{source}: {exc}") from None
        sources[name] = origin
    if values["kv_tokens"] and values["kv_memory"]:
        both = [f"{flag_name(name)} ({sources[name]})" for name in ("kv_tokens", "kv_memory")]
        raise SettingError(f"{' and '.join(both)} size the same cache: set one of them")
    has_keys = values["api_key"] or values["api_key_file"]
    for name in ("cache_scope", "spec_scope"):
        if values[name] == "key" and not has_keys:
            raise SettingError(f"{flag_name(name)} key: there are no API keys; --api-key sets one")
    if values["key_requests"] and not has_keys:
        raise SettingError("--key-requests: there are no API keys; --api-key sets one")
    if bool(values["tls_cert"]) != bool(values["tls_key"]):
        there, lacking = ("cert", "key") if values["tls_cert"] else ("key", "cert")
        raise SettingError(f"--tls-{there} needs --tls-{lacking}")
    if values["spec_device"] and not parse_spec(values["spec"]).draft:
        raise SettingError("--spec-device: there is no draft model for it; --spec draft:MODEL names one")
    return Loaded(Settings(**values), sources)


def find_config_file() -> Path | None:
    """hetero.toml in the current folder, else in the user's configuration folder, else None."""
    import platformdirs

    user_folder = Path(platformdirs.user_config_dir("hetero", appauthor=False))
    candidates = [Path(CONFIG_FILE), user_folder / CONFIG_FILE]
    return next((path for path in candidates if path.is_file()), None)


def read_config_file(path: Path) -> dict[str, Any]:
    """The file's table; SettingError names an unknown key and the nearest known one."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Windows' editor begins with a mark
    except (OSError, UnicodeDecodeError) as exc:
        raise SettingError(f"{path}: {unreadable(exc)}") from None
    except tomllib.TOMLDecodeError as exc:
        raise SettingError(f"{path}: {exc}") from None
    for key in table:
        if key not in SPECS:
            near = difflib.get_close_matches(key.replace("-", "_").lower(), SPECS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "hetero serve --print-config shows all there are"
            raise SettingError(f"{path}: unknown setting {key!r}; {hint}")
    return table


def _convert(spec: dataclasses.Field[Any], raw: Any) -> Any:
    meta = spec.metadata
    kind = meta["kind"]
    if kind == "list":
        items = [raw] if isinstance(raw, str) else raw
        if not isinstance(items, (list, tuple)) or not all(isinstance(i, str) and i for i in items):
            raise ValueError("must be a list of non-empty strings")
        return tuple(_address(i) for i in items) if meta.get("address") else tuple(items)
    if kind == "counts":
        items = raw.split(",") if isinstance(raw, str) else raw
        if not isinstance(items, (list, tuple)) or not items:
            raise ValueError("must be whole numbers with commas between, such as 20,12")
        return tuple(_number(i.strip() if isinstance(i, str) else i, "int", 1, meta["high"]) for i in items)
    if meta.get("off") and isinstance(raw, str) and raw.lower() == "off":
        return OFF if kind == "size" else None
    if kind in ("int", "size"):
        return _number(raw, kind, meta["low"], meta["high"])
    if not isinstance(raw, str) or not raw or "\0" in raw:
        raise ValueError("must be a non-empty string")
    if kind == "kv_types":
        return parse_kv_types(raw)
    if kind == "folder_limit":
        return _folder_limit(raw, meta["low"])
    if kind == "spec":
        parse_spec(raw)
    if meta.get("address"):
        _address(raw)
    if kind == "choice" and raw not in meta["choices"]:
        raise ValueError(f"{raw!r} is not one of {', '.join(meta['choices'])}")
    return str(Path(raw).expanduser()) if kind == "path" else raw


def _folder_limit(raw: str, low: int) -> FolderLimit:
    folder, _, size = raw.rpartition(":")  # the last: a folder of Windows may have one, too
    if not folder:
        raise ValueError(f"{raw!r} is not DIR:SIZE, such as /var/cache/hetero:20GiB")
    return FolderLimit(str(Path(folder).expanduser()), _number(size, "size", low, 1 << 62))


def _address(raw: str) -> str:
    """An address on the web, or what stands for any origin or for a page without one."""
    if raw not in ("*", "null") and not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s]+\S*", raw):
        raise ValueError(f"{raw!r} is not an address such as http://localhost:3000")
    return raw


def _number(raw: Any, kind: str, low: int, high: int) -> int:
    if isinstance(raw, bool) or not isinstance(raw, (int, str)):
        raise ValueError("must be a size such as 2GiB" if kind == "size" else "must be a whole number")
    try:
        value = parse_size(raw) if kind == "size" else int(raw)
    except ValueError as exc:
        raise ValueError(f"{raw!r} {exc if kind == 'size' else 'is not a whole number'}") from None
    if not low <= value <= high:
        shown = [format_size(n) if kind == "size" and n else str(n) for n in (low, high, value)]
        bound = f"at least {shown[0]}" if high >= 1 << 62 else f"between {shown[0]} and {shown[1]}"
        raise ValueError(f"must be {bound}, not {shown[2]}")
    return value


def describe(loaded: Loaded) -> list[tuple[str, str, str]]:
    """(name, value, source) of each setting, as `--print-config` shows them; secrets are masked."""
    rows = []
    for name, spec in SPECS.items():
        value = getattr(loaded.settings, name)
        secret = spec.metadata.get("secret") and value
        text = f"{len(value)} set" if secret else show_value(spec, value)
        rows.append((name, text, loaded.sources[name]))
    return rows


def show_value(spec: dataclasses.Field[Any], value: Any) -> str:
    """A setting's value for people."""
    if value is None or value == ():
        return "-"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if spec.metadata.get("off") and value == OFF:
        return "off"
    return format_size(value) if spec.metadata["kind"] == "size" and value else str(value)


if __name__ == "__main__":
    from hetero.config_docs import render_docs

    print(render_docs(), end="")
