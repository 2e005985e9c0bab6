"""Filters and string methods of chat templates, each measured before it makes something large."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterable
from typing import Any

from jinja2 import filters as jinja

from hetero.text.meter import MAX_CHARS, MAX_ITEMS, MeteredIterable, Refused, current

MAX_NUMBER = 1000  # widths, precisions, indents


def bound_number(value: object) -> None:
    """Refuse a width or precision that only serves to make something huge."""
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise Refused(f"the chat template uses a width of more than {MAX_NUMBER}")


def bound_format(spec: str) -> None:
    """Refuse a format specification with a large width or precision."""
    for digits in re.findall(r"\d+", spec):
        bound_number(int(digits[:9]))


def join_pieces(pieces: Iterable[str]) -> str:
    """ "".join, refusing a result that is too long before making it."""
    parts = list(MeteredIterable(current(), pieces))
    current().room(sum(map(len, parts)))
    return "".join(parts)


def text_of(value: Any) -> str:
    """str(value), measured; refuses what has no text of its own."""
    if isinstance(value, str):
        return value
    current().weigh(value, printable=True)
    return str(value)


def percent(pattern: str, values: Any) -> str:
    """`pattern % values`."""
    for spec in re.findall(r"%(?:\([^)]*\))?([^a-zA-Z%]*)", pattern):
        if "*" in spec:
            raise Refused("the chat template uses '*' as a width")
        bound_format(spec)
    largest = current().weigh(values, printable=True)
    current().room(len(pattern) + pattern.count("%") * (largest + MAX_NUMBER))
    return pattern % values


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    times = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    current().room(len(text) + times * max(len(new) - len(old), 0))
    return text.replace(old, new, -1 if count is None else count)


def _join(separator: str, values: Iterable) -> str:
    parts = list(MeteredIterable(current(), values))
    current().room(sum(len(p) for p in parts if isinstance(p, str)) + len(separator) * len(parts))
    return separator.join(parts)


def _split(method: Any, args: tuple, kwargs: dict) -> list[str]:
    separator = kwargs.get("sep", args[0] if args else None)
    maxsplit = kwargs.get("maxsplit", args[1] if len(args) > 1 else -1)
    parts = method(separator, MAX_ITEMS if maxsplit < 0 else min(maxsplit, MAX_ITEMS))
    return current().keep(parts)


def call_method(method: Any, text: str, args: tuple, kwargs: dict) -> Any:
    """Call an allowed, bound method of `text`."""
    name = getattr(method, "__name__", "")
    if name == "replace":
        return _replace(text, *args, **kwargs)
    if name == "join":
        return _join(text, *args, **kwargs)
    if name in ("split", "rsplit"):
        return _split(method, args, kwargs)
    if name in ("center", "ljust", "rjust", "zfill"):
        for value in args:
            bound_number(value)
    return current().keep(method(*args, **kwargs))


def _filter_replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    return _replace(text_of(value), text_of(old), text_of(new), -1 if count is None else count)


@jinja.pass_environment
def _filter_join(environment, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    items: Iterable = MeteredIterable(current(), value)
    if attribute is not None:
        items = map(jinja.make_attrgetter(environment, attribute), items)
    return _join(text_of(d), map(text_of, items))


def _filter_indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    bound_number(width if isinstance(width, int) else len(width))
    text = text_of(value)
    padding = width if isinstance(width, int) else len(width)
    current().room(len(text) + (len(text.splitlines()) + 1) * padding)
    return str(jinja.do_indent(text, width, first, blank))


def _filter_list(value: Any) -> list:
    return list(itertools.islice(MeteredIterable(current(), value), MAX_ITEMS + 1))


def _filter_round(value: float, precision: int = 0, method: str = "common") -> float:
    if abs(precision) > 20:
        raise Refused("the chat template rounds to more than 20 digits")
    return jinja.do_round(value, precision, method)  # type: ignore[arg-type]


@jinja.pass_environment
def _filter_sum(environment, iterable: Any, attribute: str | int | None = None, start: float = 0) -> Any:
    if not isinstance(start, (int, float)):
        raise Refused("the chat template adds up things that are not numbers")
    return jinja.sync_do_sum(environment, MeteredIterable(current(), iterable), attribute, start)


def _filter_tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's `tojson` writes it: neither HTML nor non-ASCII characters are escaped."""
    meter = current()
    meter.weigh(value)
    bound_number(indent if isinstance(indent, int) else len(indent or ""))
    bound_number(sum(map(len, separators or ())))
    encoder = json.JSONEncoder(
        ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators, sort_keys=bool(sort_keys)
    )
    if indent is None and separators is None:
        return encoder.encode(value)
    pieces, size = [], 0
    for piece in encoder.iterencode(value):  # in pieces: indentation can be much larger than the value
        meter.tick()
        pieces.append(piece)
        size += len(piece)
        if size > MAX_CHARS:
            break
    return join_pieces(pieces)


def _measured(function):
    """The filter, with the clock read before and its result measured."""

    @functools.wraps(function)
    def measured(*args, **kwargs):
        current().tick()
        return current().keep(function(*args, **kwargs))

    return measured


def _over_items(function):
    """A lazy filter of Jinja that takes (context, items, ...), with the clock read at each item."""

    @functools.wraps(function)
    def metered(context, items=(), *args, **kwargs):
        return function(context, MeteredIterable(current(), items), *args, **kwargs)

    return metered


def _loop(items: Any) -> MeteredIterable:
    return MeteredIterable(current(), items)


def _concat(values: list) -> str:
    return join_pieces(map(text_of, values))


def _slice(value: Any) -> Any:
    current().room(len(value))
    return value


# Filters whose names no template can write stand for syntax: see _Metering in hetero.text.sandbox.
FILTERS: dict[str, Any] = {
    "#loop": _loop,
    "#concat": _concat,
    "#slice": _slice,
    "#keep": lambda value: current().keep(value),
    "safe": text_of,
    **{
        name: _measured(function)
        for name, function in {
            "abs": abs,
            "capitalize": lambda value: text_of(value).capitalize(),
            "d": jinja.do_default,
            "default": jinja.do_default,
            "dictsort": jinja.do_dictsort,
            "first": jinja.sync_do_first,
            "float": jinja.do_float,
            "format": lambda value, *args, **kwargs: percent(text_of(value), kwargs or args),
            "groupby": jinja.sync_do_groupby,
            "indent": _filter_indent,
            "int": jinja.do_int,
            "items": jinja.do_items,
            "join": _filter_join,
            "last": jinja.do_last,
            "list": _filter_list,
            "lower": lambda value: text_of(value).lower(),
            "max": jinja.do_max,
            "min": jinja.do_min,
            "replace": _filter_replace,
            "reverse": jinja.do_reverse,
            "round": _filter_round,
            "sort": jinja.do_sort,
            "string": text_of,
            "sum": _filter_sum,
            "title": lambda value: jinja.do_title(text_of(value)),
            "tojson": _filter_tojson,
            "trim": lambda value, chars=None: text_of(value).strip(chars),
            "unique": jinja.do_unique,
            "upper": lambda value: text_of(value).upper(),
        }.items()
    },
    **{name: _measured(len) for name in ("count", "length")},
    **{
        name: _over_items(function)
        for name, function in {
            "map": jinja.sync_do_map,
            "reject": jinja.sync_do_reject,
            "rejectattr": jinja.sync_do_rejectattr,
            "select": jinja.sync_do_select,
            "selectattr": jinja.sync_do_selectattr,
        }.items()
    },
}
