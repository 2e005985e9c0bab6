"""How much the tests do: as much as every change can wait for, or with HETERO_TEST_SCALE=full all of it."""

import os

FULL = os.environ.get("HETERO_TEST_SCALE") == "full"
# Threads of a test's servers and engines. With more of them than idle cores everything takes many times as
# long, and the machine that runs the tests may be a busy one: with their other half, to begin with.
THREADS = (os.cpu_count() or 1) if FULL else 1


def scaled(short: int, full: int) -> int:
    """A count for an everyday run, or with HETERO_TEST_SCALE=full the case's own."""
    return full if FULL else short
