"""Typed reading of a JSON object's fields. A null is as good as absent; unknown fields are ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hetero.server.errors import ApiError, bad_field

_NAMES = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def type_name(value: Any) -> str:
    return "null" if value is None else _NAMES.get(type(value), type(value).__name__)


def wrong_type(param: str, wanted: str, value: Any) -> ApiError:
    return bad_field(param, f"must be {wanted}, not {type_name(value)}")


class Fields:
    """Reads fields of `body` by type. Each reader raises ApiError 400, naming the field, on a wrong value.

    `prefix` goes before the names in errors: "messages[2]." for a nested object.
    """

    def __init__(self, body: Mapping[str, Any], prefix: str = "") -> None:
        self.body = body
        self.prefix = prefix

    def has(self, name: str) -> bool:
        return self.body.get(name) is not None

    def name(self, name: str) -> str:
        return self.prefix + name

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong_type(self.name(name), "true or false", value)
        return value

    def number(self, name: str, default: float) -> float:
        value = self.body.get(name)
        if value is None:
            return default
        return as_number(self.name(name), value)

    def integer(self, name: str, low: int | None = None, high: int | None = None) -> int | None:
        value = self.body.get(name)
        if value is None:
            return None
        number = as_integer(self.name(name), value)
        if (low is not None and number < low) or (high is not None and number > high):
            bounds = (
                f"at least {low}"
                if high is None
                else f"at most {high}"
                if low is None
                else f"{low} to {high}"
            )
            raise bad_field(self.name(name), f"must be {bounds}, not {number}")
        return number

    def string(self, name: str) -> str | None:
        value = self.body.get(name)
        if value is not None and not isinstance(value, str):
            raise wrong_type(self.name(name), "a string", value)
        return value

    def object(self, name: str) -> dict[str, Any] | None:
        value = self.body.get(name)
        if value is not None and not isinstance(value, dict):
            raise wrong_type(self.name(name), "an object", value)
        return value

    def array(self, name: str) -> list[Any] | None:
        value = self.body.get(name)
        if value is not None and not isinstance(value, list):
            raise wrong_type(self.name(name), "an array", value)
        return value


def as_number(param: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong_type(param, "a number", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise bad_field(param, "the number is too large")
    return number


def as_integer(param: str, value: Any) -> int:
    """`value` as an int; 5.0 counts as 5, since some clients write every number so."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad_field(
            param, f"must be an integer, not {value if isinstance(value, float) else type_name(value)}"
        )
    return value
