"""The setting kv_type: in which formats keys and values are kept. backends/kv_format.py has their sizes."""

from __future__ import annotations

from dataclasses import dataclass

KV_TYPES = ("f16", "fp8", "q8_0")
DEFAULT = "f16"


@dataclass(frozen=True, slots=True)
class KVTypes:
    """Formats of KV_TYPES. As text, `fp8` where they are the same, else `k=q8_0,v=fp8`."""

    keys: str = DEFAULT
    values: str = DEFAULT

    def __str__(self) -> str:
        return self.keys if self.keys == self.values else f"k={self.keys},v={self.values}"


F16 = KVTypes()


def parse_kv_types(text: str) -> KVTypes:
    """A format for keys and values alike, or `k=` and `v=`, in any order; one left out is the default.

    ValueError says what is wrong with the text.
    """
    parts = [part.strip() for part in text.lower().split(",")]
    if len(parts) == 1 and "=" not in parts[0]:
        return KVTypes(_known(parts[0]), _known(parts[0]))
    found: dict[str, str] = {}
    for part in parts:
        name, equals, kind = part.partition("=")
        if not equals or name not in ("k", "v") or name in found:
            raise ValueError(f"{text!r} is not a format such as fp8, nor a pair such as k=q8_0,v=fp8")
        found[name] = _known(kind)
    return KVTypes(found.get("k", DEFAULT), found.get("v", DEFAULT))


def parse_several(text: str) -> list[KVTypes]:
    """Several with commas between, such as `fp8,k=q8_0,v=fp8`; a `k=` and a `v=` side by side are one.

    ValueError as above.
    """
    parts: list[str] = []
    for part in text.split(","):
        half = part.strip().lower()[:2]
        before = parts[-1].strip().lower() if parts else ""
        if {half, before[:2]} == {"k=", "v="} and "," not in before:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return [parse_kv_types(part) for part in parts]


def _known(kind: str) -> str:
    if kind not in KV_TYPES:
        raise ValueError(f"{kind!r} is not one of {', '.join(KV_TYPES)}")
    return kind


__all__ = ["F16", "KV_TYPES", "KVTypes", "parse_kv_types", "parse_several"]
