"""JSON schemas as clients write them, at random: every keyword, in odd combinations too."""

from __future__ import annotations

import string

from hypothesis import strategies as st

NAMES = ["a", "b", "name", "größe", "x y", 'q"', "0"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-20, 20) | st.sampled_from([0.5, -1e3, "", "a", "é😸", 'q"\\']),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
    max_leaves=4,
)
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]
PATTERNS = ["^a+$", "b", r"\d{2,3}", "^(x|y)[a-z]?$", r"^\w+@\w+$", "[^a]", "^$", "(?=a)", "é"]
FORMATS = ["date-time", "date", "time", "email", "ipv4", "ipv6", "uuid", "uri", "hostname", "regex", "custom"]
KEYWORDS = ("uniqueItems", "not", "contains", "if", "dependentRequired", "propertyNames")


def _some(draw, options: dict[str, st.SearchStrategy], at_most: int = 3) -> dict:
    names = draw(st.lists(st.sampled_from(sorted(options)), unique=True, max_size=at_most))
    return {name: draw(options[name]) for name in names}


@st.composite
def strings(draw, inner):
    small = st.integers(0, 6)
    return {"type": "string"} | _some(
        draw,
        {
            "minLength": small, "maxLength": small, "pattern": st.sampled_from(PATTERNS),
            "format": st.sampled_from(FORMATS), "enum": st.lists(VALUES, min_size=1, max_size=3),
        },
        at_most=2,
    )  # fmt: skip


@st.composite
def numbers(draw, inner):
    number = st.integers(-30, 30) | st.sampled_from([0.5, -2.25, 1e3])
    return {"type": draw(st.sampled_from(["integer", "number"]))} | _some(
        draw,
        {
            "minimum": number, "maximum": number, "exclusiveMinimum": number, "exclusiveMaximum": number,
            "multipleOf": st.sampled_from([1, 2, 5, 0.5, 0.25]),
        },
    )  # fmt: skip


@st.composite
def arrays(draw, inner):
    small = st.integers(0, 3)
    return {"type": "array"} | _some(
        draw,
        {
            "items": inner | st.booleans(), "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "minItems": small, "maxItems": small, "uniqueItems": st.booleans(), "contains": inner,
        },
    )  # fmt: skip


@st.composite
def objects(draw, inner):
    small = st.integers(0, 3)
    name = st.sampled_from(NAMES)
    return {"type": "object"} | _some(
        draw,
        {
            "properties": st.dictionaries(name, inner, min_size=1, max_size=3),
            "required": st.lists(name, unique=True, max_size=2),
            "additionalProperties": st.booleans() | inner,
            "patternProperties": st.dictionaries(st.sampled_from(PATTERNS), inner, min_size=1, max_size=2),
            "minProperties": small, "maxProperties": small, "propertyNames": inner,
            "dependentRequired": st.dictionaries(name, st.lists(name, max_size=2), max_size=1),
        },
        at_most=4,
    )  # fmt: skip


@st.composite
def combined(draw, inner):
    some = st.lists(inner, min_size=1, max_size=3)
    return _some(
        draw,
        {
            "anyOf": some, "oneOf": some, "allOf": some, "not": inner, "if": inner, "then": inner,
            "enum": st.lists(VALUES, min_size=1, max_size=4), "const": VALUES,
            "type": st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), unique=True, min_size=1),
            "$ref": st.sampled_from(["#/$defs/d", "#", "#/$defs/none", "https://example.com/s.json"]),
            "title": st.text(string.ascii_letters, max_size=5), "nonsense": VALUES,
            "minimum": st.integers(-3, 3), "maxLength": st.integers(0, 3),
            "properties": st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=2),
        },
    )  # fmt: skip


def _grow(inner: st.SearchStrategy) -> st.SearchStrategy:
    return strings(inner) | numbers(inner) | arrays(inner) | objects(inner) | combined(inner)


@st.composite
def schemas(draw):
    """A schema for `response_format`: an object, with definitions where it may refer to them."""
    schema = draw(_grow(st.recursive(st.booleans() | st.just({"type": "string"}), _grow, max_leaves=5)))
    if draw(st.booleans()):
        schema = {**schema, "$defs": {"d": draw(_grow(st.just({"type": "integer"})))}}
    return schema
