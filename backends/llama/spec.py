"""How libllama is to hold a model. Plain values: `dataclasses.asdict` gives JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backends.base import DeviceSpec


@dataclass(frozen=True, slots=True)
class LlamaSpec:
    """`devices` beside the CPU, in the order of their layers, and how many layers each has; the layers that
    are left are the CPU's, and come first. `sequences`: so many are known at a time. `cells`: tokens in the
    cache. `threads` of the CPU, 0 for one per core.

    `keeps_prefixes`: a sequence can be copied and cut anywhere, so that known beginnings are found again.
    Where states take the place of keys and values, a sequence can only go on.
    """

    devices: tuple[DeviceSpec, ...]
    layers: tuple[int, ...]
    sequences: int
    cells: int
    threads: int = 0
    keeps_prefixes: bool = True
    key_type: str = "f16"
    value_type: str = "f16"

    def __post_init__(self) -> None:
        if len(self.devices) != len(self.layers) or min(self.sequences, self.cells) < 1:
            raise ValueError("layers for other devices than there are, or no sequence and no cell")


def read_spec(parts: Any) -> LlamaSpec:
    """The LlamaSpec of plain JSON. Raises ValueError."""
    if not isinstance(parts, dict):
        raise ValueError("no LlamaSpec")
    try:
        plain: dict[str, Any] = _tuples(parts)
        plain["devices"] = tuple(DeviceSpec(**_tuples(device)) for device in parts["devices"])
        return LlamaSpec(**plain)
    except (KeyError, TypeError, AttributeError):
        raise ValueError("no LlamaSpec") from None


def _tuples(parts: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in parts.items()}
