"""Starting child processes."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_interrupts() -> Iterator[None]:
    """A child started here ignores Ctrl-C from its first moment; the parent, which ends it, does not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def own_command() -> list[str]:
    """How to start this program again, with its arguments to follow: frozen into one file, or from Python."""
    return [sys.executable] if getattr(sys, "frozen", False) else [sys.executable, "-m", "cli"]
