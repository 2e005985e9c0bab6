"""What one rendering of an untrusted template may use: time, characters, elements.

Python cannot take memory back from an operation that has begun, so sizes are known before: no value
a template can build is larger than `MAX_CHARS` characters and elements when written out in full. That
also bounds every single C call (comparing, printing, searching), and the clock is read between calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from jinja2.runtime import Undefined

MAX_CHARS = 4 << 20  # about a million tokens: more than any prompt
MAX_ITEMS = 200_000  # elements of one container, all levels together
MAX_INT_BITS = 4096
MAX_TOTAL = 64 << 20  # characters and elements made during one rendering, kept or not
MAX_SECONDS = 1.5  # of processor time, so that a busy machine fails nobody


class Refused(Exception):
    """The template does what it may not; the message is for the client."""


class Meter:
    """The use of one rendering so far. Starts when made; used by one thread."""

    def __init__(self, inputs: object = None):
        self._deadline = time.thread_time() + MAX_SECONDS
        self._total = 0
        self._known: dict[int, tuple[int, int]] = {}
        if inputs is not None:
            self._learn(inputs)

    def tick(self) -> None:
        """Refuse to go on past the deadline."""
        if time.thread_time() > self._deadline:
            raise Refused(f"the chat template runs for more than {MAX_SECONDS:g} s")

    def room(self, chars: int) -> None:
        """Refuse a text of `chars` characters before it is made, if too long."""
        if chars > MAX_CHARS:
            raise Refused(f"the chat template makes a text of more than {MAX_CHARS} characters")
        self._charge(chars)

    def _charge(self, amount: int) -> None:
        self._total += amount
        if self._total > MAX_TOTAL:
            raise Refused("the chat template needs too much memory")
        self.tick()

    def keep(self, value):
        """`value`, once it is known to be small enough."""
        if isinstance(value, str):
            self.room(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self._charge(len(value))
            self.weigh(value)
        elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise Refused(f"the chat template makes a number of more than {MAX_INT_BITS} bits")
        return value

    def weigh(self, value: object, *, printable: bool = False) -> int:
        """Characters of `value` written out, roughly; shared parts count each time they occur.

        With `printable`, refuse what has no text of its own (a function, a generator).
        """
        chars, items = self._weigh(value, printable)
        if chars > MAX_CHARS or items > MAX_ITEMS:
            raise Refused("the chat template makes a value that is too large")
        return chars

    def _weigh(self, value: object, printable: bool) -> tuple[int, int]:
        chars = items = 0
        stack = [value]
        while stack:
            node = stack.pop()
            items += 1
            if isinstance(node, str):
                chars += len(node)
            elif isinstance(node, (list, tuple, dict)):
                known = self._known.get(id(node))
                if known is not None:
                    chars, items = chars + known[0], items + known[1]
                elif len(node) + len(stack) > MAX_ITEMS:
                    return chars, MAX_ITEMS + 1
                else:
                    stack.extend(node.values() if isinstance(node, dict) else node)
                    if isinstance(node, dict):
                        stack.extend(node)
                    chars += 4 * len(node)
            elif isinstance(node, int) and not isinstance(node, bool):
                chars += node.bit_length() // 3 + 2
            elif node is None or isinstance(node, (bool, float, Undefined)) or not printable:
                chars += 24
            else:
                raise Refused("the chat template prints something that is not text, a number or a list")
            if chars > MAX_CHARS or items > MAX_ITEMS:
                break
        return chars, items

    def _learn(self, value: object) -> None:
        """Remember the weights of the template's inputs, which live as long as the rendering."""
        if isinstance(value, (list, tuple, dict)):
            for child in value.values() if isinstance(value, dict) else value:
                self._learn(child)
            self._known[id(value)] = self._weigh(value, False)


class MeteredIterable:
    """An iterable that looks at the clock at each step, so that no loop is endless."""

    def __init__(self, meter: Meter, items: Iterable):
        self._meter = meter
        self._items = items

    def __iter__(self):
        tick = self._meter.tick
        for item in self._items:
            tick()
            yield item

    def __bool__(self) -> bool:
        return bool(self._items)

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # TypeError for generators, as without us


_current = threading.local()


def current() -> Meter:
    """The meter of the rendering that runs in this thread."""
    return _current.meter


def use(meter: Meter | None) -> None:
    _current.meter = meter
