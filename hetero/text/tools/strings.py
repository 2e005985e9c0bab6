"""Strings that a schema describes, as terminals of a Lark grammar: raw text, without quotes or escapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hetero.text.tools.lark import ANY_TEXT, Inexpressible

# What says something about a value, in the drafts of JSON Schema; other words are notes.
KEYWORDS = frozenset(
    (
        *(
            "$ref",
            "$dynamicRef",
            "$recursiveRef",
            "type",
            "enum",
            "const",
            "format",
            "not",
            "if",
            "then",
            "else",
        ),
        *("allOf", "anyOf", "oneOf", "minLength", "maxLength", "pattern", "minimum", "maximum", "multipleOf"),
        *("exclusiveMinimum", "exclusiveMaximum", "items", "prefixItems", "additionalItems", "uniqueItems"),
        *("contains", "minContains", "maxContains", "minItems", "maxItems", "unevaluatedItems", "properties"),
        *("patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames", "required"),
        *("minProperties", "maxProperties", "dependencies", "dependentRequired", "dependentSchemas"),
    )
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_DATE = (
    r"[1-9]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|[12]\d))"
)
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,6}}"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
# RFC 3339, 5321, 1123, 2673, 4122 and 3986, the parts of them that are in use. \d means ASCII's here.
FORMATS = {
    name: regex.replace(r"\d", "[0-9]").replace("/", r"\/")
    for name, regex in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}T{_TIME}",
        "email": rf"[a-zA-Z0-9_+-]{{1,40}}(\.[a-zA-Z0-9_+-]{{1,40}}){{0,5}}@{_HOST}",
        "hostname": _HOST,
        "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
        "uuid": "[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
        "uri": r"[a-zA-Z][a-zA-Z0-9+.-]*:([a-zA-Z0-9._~:/?#@!$&'()*+,;=-]|%[0-9a-fA-F]{2})+",
    }.items()
}
_JSON_ONLY_FORMATS = ("duration", "ipv6")  # llguidance enforces them in JSON
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.S)


def constraints(schema: Mapping[str, Any]) -> frozenset[str]:
    return KEYWORDS.intersection(schema)


def string_forms(schema: Mapping[str, Any], lenient: bool) -> list[str]:
    """Terminal expressions, all of which a string of this schema matches. `lenient`: unknown formats are
    passed over, as llguidance's option of this name does. Raises Inexpressible."""
    words = constraints(schema) - {"type"}
    # Of several kinds nobody here sees whether a text can follow them all; in JSON that is looked into.
    if not any(words <= kind for kind in ({"minLength", "maxLength"}, {"pattern"}, {"format"})):
        raise Inexpressible
    forms = []
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least or most is not None:
        if not all(isinstance(length, int) and length >= 0 for length in (least, most or 0)):
            raise Inexpressible
        if most is not None and least > most:
            raise Inexpressible
        forms.append(f"/(?s:.{{{least},{'' if most is None else most}}})/")
    if "pattern" in schema:
        forms.append(f"/{_searched(schema['pattern'])}/")
    name = schema.get("format")
    if name in FORMATS:
        forms.append(f"/{FORMATS[name]}/")
    elif name is not None and (not lenient or name in _JSON_ONLY_FORMATS):
        raise Inexpressible
    return forms or [ANY_TEXT]


def _searched(pattern: Any) -> str:
    """A regular expression for all of a text in which `pattern`, of ECMA's kind, is found."""
    if not isinstance(pattern, str) or "\n" in pattern:
        raise Inexpressible
    begins, ends, depth, pieces = False, False, 0, []
    has_bar = False
    for found in _PIECE.finditer(pattern):
        piece = found.group()
        if piece == "^" and found.start() == 0:
            begins = True
            continue
        if piece == "$" and found.end() == len(pattern):
            ends = True
            continue
        # Rust's classes nest and have operators; anchors elsewhere need a look around.
        if piece in "^$" or (piece[0] == "[" and re.search(r"\[|&&|--|~~", piece[1:])):
            raise Inexpressible
        depth += (piece == "(") - (piece == ")")
        has_bar |= piece == "|" and depth == 0
        pieces.append(piece.replace("/", r"\/") if piece != r"\/" else piece)
    if has_bar and (begins or ends):
        raise Inexpressible
    before, behind = ("" if anchored else "(?s:.*)" for anchored in (begins, ends))
    return f"{before}({''.join(pieces)}){behind}"
