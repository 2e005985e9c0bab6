"""A server in a thread of its own, for clients that block as a program's do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from in_thread import in_thread

from .client import running
from .fake_engine import FakeEngine

KEY = "sk-test"

# What models of the Hermes and Qwen families write. The template only has to look like theirs.
HERMES = "{{ tools }}<tool_call></tool_call>"
THINKING = HERMES + "<think></think>"
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET", "exact": true}}\n</tool_call>'


@contextmanager
def in_background(engine: FakeEngine, **settings: Any) -> Iterator[str]:
    """The address of a server over `engine` that asks for KEY."""
    with in_thread(lambda: running(engine, api_keys=(KEY,), **settings)) as client:
        yield client.base
