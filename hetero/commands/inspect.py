"""`hetero doctor`: look, load nothing. And how commands print tables and errors."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any


def doctor(as_json: bool, measure_kernels: bool) -> int:
    """Run all checks, perhaps with the speed of our matmuls. Exit code 1 when one fails."""
    from hetero.plan.checks import run_checks

    checks = list(run_checks(measure_kernels))
    if as_json:
        _print_json([dataclasses.asdict(c) for c in checks])
    else:
        print_table(("", "check", "found"), [("ok" if c.ok else "FAILED", c.name, c.detail) for c in checks])
    return 0 if all(c.ok for c in checks) else 1


def fail(error: Exception) -> int:
    """One line on standard error, and the exit code of a failure."""
    print(f"hetero: {' '.join(str(error).split())}", file=sys.stderr)
    return 1


def print_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Columns padded to their widest cell; the last one runs free."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))
