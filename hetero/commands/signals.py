"""SIGTERM for commands that have something to clean up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """SIGTERM cleans up like Ctrl-C, also as a container's first process, where it would be ignored. Only the
    main thread may say so; in another one this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
