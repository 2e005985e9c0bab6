"""An asynchronous context of a test's own event loop, in a thread, for clients that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
WAIT_SECONDS = 10


@contextmanager
def in_thread(make: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """What the context that `make` makes there gives, for the length of the block."""
    ready = threading.Event()
    box: dict[str, Any] = {}

    async def main() -> None:
        box["loop"], box["done"] = asyncio.get_running_loop(), asyncio.Event()
        async with make() as box["given"]:
            ready.set()
            await box["done"].wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert ready.wait(WAIT_SECONDS)
        yield box["given"]
    finally:
        box["loop"].call_soon_threadsafe(box["done"].set)
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
