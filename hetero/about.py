"""What a server tells about itself to whoever wants to repeat a measurement: no key, no path, no address."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hetero.files import file_name
from hetero.settings import SPECS, FolderLimit, Settings
from hetero.sizes import format_size
from hetero.spec_setting import parse_spec

# They say who may ask and where things are, and nothing about what is computed.
_DOOR = ("host", "port", "device", "allowed_host", "allowed_origin", "otlp", "model_name", "log_level")


@dataclass(frozen=True, slots=True)
class About:
    """`model_digest` is hetero.kv.fingerprint.model_digest, in hex digits; the rest is JSON.

    `devices` are those that compute, in the order of the layers; `settings` has every setting that has to do
    with what is computed and how fast.
    """

    model_digest: str
    versions: dict[str, str]
    devices: tuple[dict[str, Any], ...]
    settings: dict[str, Any]


def shown_settings(settings: Settings) -> dict[str, Any]:
    """Settings for others to see. Of a file or a folder it is only told whether there is one."""
    return {f.name: _shown(f.name, getattr(settings, f.name)) for f in fields(settings) if _is_told(f.name)}


def _is_told(name: str) -> bool:
    return name not in _DOOR and not SPECS[name].metadata.get("secret")


def _shown(name: str, value: Any) -> Any:
    kind = SPECS[name].metadata["kind"]
    if kind == "path":
        return value is not None
    if isinstance(value, FolderLimit):
        return format_size(value.nbytes)
    if name == "model":
        return None if value is None else file_name(value)
    if kind == "spec" and (draft := parse_spec(value).draft) is not None:
        return value.replace(draft, file_name(draft))
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)
