"""The environment chat templates run in: Hugging Face's dialect of Jinja, and nothing that can hurt.

A template comes inside a model file, so it is a stranger's program. It reaches plain data only: an
allow-list of methods and filters, no attribute of any other object, no loader. Whatever can grow is
measured before it grows (hetero.text.meter).
"""

from __future__ import annotations

import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from hetero.text import filters
from hetero.text.filters import bound_format, call_method
from hetero.text.meter import MAX_INT_BITS, Refused, current

MAX_DEPTH = 64  # statements around a statement; templates in use have about 10


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ATTRIBUTES: list[tuple[type, frozenset[str]]] = [
    (
        str,
        _names(
            """capitalize casefold center count endswith find format format_map index isalnum isalpha isascii
            isdecimal isdigit islower isnumeric isspace istitle isupper join ljust lower lstrip partition
            removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines
            startswith strip swapcase title upper zfill"""
        ),
    ),
    (dict, _names("copy get items keys values")),
    (list, _names("copy count index")),
    (tuple, _names("count index")),
    (Macro, _names("arguments caller catch_kwargs catch_varargs name")),
    (
        LoopContext,
        _names(
            """changed cycle depth depth0 first index index0 last length nextitem previtem revindex
            revindex0"""
        ),
    ),
]


class PlainNamespace(Namespace):
    """`namespace()` of templates. Never prints its content, which may refer to itself."""

    def __repr__(self) -> str:
        return "namespace"


class Helper:
    """A function for templates that is nothing but callable: no `__globals__`, no module."""

    __slots__ = ("__call",)

    def __init__(self, function):
        self.__call = function

    def __call__(self, *args, **kwargs):
        return self.__call(*args, **kwargs)

    def __repr__(self) -> str:
        return "function"


def _raise_exception(message: object = "") -> None:
    raise Refused(str(current().keep(message))[:1000] or "the chat template refuses these messages")


def _strftime_now(pattern: str) -> str:
    if not isinstance(pattern, str) or len(pattern) > 100:
        raise Refused("strftime_now takes a format of up to 100 characters")
    return datetime.datetime.now().strftime(pattern)


def _dict(*args, **kwargs) -> dict:
    return current().keep(dict(*args, **kwargs))


def _range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > 100_000:
        raise Refused("range() of more than 100000 numbers")
    return numbers


class _Generation(Extension):
    """`{% generation %}` marks what a model is trained on; for inference it is transparent."""

    tags = {"generation"}  # noqa: RUF012  (as in the base class)

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Metering(NodeTransformer):
    """Sends what a template's syntax does without a call through a filter that measures it."""

    _depth = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self._depth += isinstance(node, nodes.Stmt)
        if self._depth > MAX_DEPTH:  # Jinja's compiler walks the body of a loop once per loop around it
            raise Refused("its statements are nested too deeply")
        result = super().visit(node, *args, **kwargs)
        self._depth -= isinstance(node, nodes.Stmt)
        return result

    def _filter(self, node: Any, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._filter(node.iter, "#loop")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(nodes.List(node.nodes, lineno=node.lineno), "#concat")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx == "store" else self._filter(node, "#keep")

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(node, "#keep")

    visit_Dict = visit_List

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(node, "#slice") if isinstance(node.arg, nodes.Slice) else node


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        bound_format(format_spec)
        current().weigh(value, printable=True)
        return super().format_field(value, format_spec)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates. One is enough for a process; see hetero.text.template for rendering."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants are computed while the meter runs, not while compiling
            autoescape=False,
            loader=None,
            cache_size=0,
            finalize=_finalize,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.filters = dict(filters.FILTERS)
        self.globals = {
            "range": Helper(_range),
            "dict": Helper(_dict),
            "namespace": PlainNamespace,
            "raise_exception": Helper(_raise_exception),
            "strftime_now": Helper(_strftime_now),
        }

    def concat(self, pieces) -> str:  # type: ignore[override]
        """What macros and block assignments join their output with."""
        return filters.join_pieces(pieces)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Metering().visit(super()._parse(source, name, filename))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr.startswith("_"):
            return False
        for kind, allowed in _ATTRIBUTES:
            if isinstance(obj, kind):
                return attr in allowed
        return isinstance(obj, Namespace)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        return self.undefined(f"access to {attribute!r} is not allowed", exc=jinja2.exceptions.SecurityError)

    def wrap_str_format(self, value: Any):
        text = getattr(value, "__self__", None)
        name = getattr(value, "__name__", None)
        if not isinstance(text, str) or name not in ("format", "format_map"):
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            if name == "format_map":
                return formatted_with((), *args)
            return formatted_with(args, kwargs)

        def formatted_with(args: tuple, kwargs: dict) -> str:
            largest = max(map(current().weigh, (*args, *kwargs.values())), default=0)
            current().room(len(text) + text.count("{") * largest)
            return _Formatter(self).vformat(text, args, kwargs)

        return Helper(formatted)

    def call(__self, __context, __obj, *args, **kwargs):
        current().tick()
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            kwargs.pop("_loop_vars", None)  # from Jinja's compiler, for calls that take the context
            kwargs.pop("_block_vars", None)
            return call_method(__obj, text, args, kwargs)
        return current().keep(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
        meter = current()
        if operator == "%" and isinstance(left, str):
            return filters.percent(left, right)
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                    meter.room(max(len(sequence), meter.weigh(sequence)) * max(times, 0))
        elif operator == "+" and isinstance(left, (str, list, tuple)) and type(left) is type(right):
            meter.room(len(left) + len(right))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            grown = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if grown > MAX_INT_BITS + 64:
                raise Refused(f"the chat template makes a number of more than {MAX_INT_BITS} bits")
        return meter.keep(super().call_binop(context, operator, left, right))


@jinja2.pass_context  # with a context, Jinja does not evaluate constant output while compiling
def _finalize(context, value: Any) -> Any:
    if not isinstance(value, str):
        current().weigh(value, printable=True)
    return value
