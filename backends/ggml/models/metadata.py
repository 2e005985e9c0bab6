"""Typed access to a model's metadata, with errors that name the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class ModelError(ValueError):
    """A model that cannot be run: unknown family or inconsistent metadata. One line for the user."""


class NotNative(ModelError):
    """The file may be right, but is of a kind that the graph builders do not have."""


class Metadata:
    """`<architecture>.<key>` of one file."""

    def __init__(self, file: str, architecture: str, metadata: Mapping[str, Any]):
        self.file, self.prefix, self.values = file, architecture, metadata

    def get(self, key: str) -> Any:
        return self.values.get(f"{self.prefix}.{key}")

    def size(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # per-layer arrays of one and the same number
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, value, f"an integer between {low} and {high}")
        return value

    def sizes(self, key: str, low: int, high: int, count: int) -> tuple[int, ...]:
        """One for each of `count` layers, of a number for all or a list."""
        value = self.get(key)
        if not isinstance(value, list):
            return (self.size(key, low, high),) * count
        if len(value) < count or not all(type(n) is int and low <= n <= high for n in value):
            raise self.error(key, value, f"{count} integers between {low} and {high}")
        return tuple(value[:count])

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, value, "a finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return default if value is None else value

    def error(self, key: str, value: Any, want: str) -> ModelError:
        found = "missing" if value is None else f"{str(value)[:40]!r}"
        return ModelError(f"{self.file}: {self.prefix}.{key} must be {want}, it is {found}")


__all__ = ["Metadata", "ModelError", "NotNative"]
