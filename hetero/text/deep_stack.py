"""Work that recurses as deeply as its input is nested, in code that does not look where its stack ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
STACK_BYTES = 256 << 20  # reserved, not taken: memory is what is reached of it
_SETTING = threading.Lock()  # the size is Python's for whatever thread is started next


def on_deep_stack(work: Callable[[], T]) -> T:
    """What `work` gives or raises, from a thread of its own that has STACK_BYTES of stack."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="deep-stack", daemon=True)
    with _SETTING:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    try:
        return done.result()
    finally:
        thread.join()
