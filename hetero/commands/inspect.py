"""`hetero devices`, `hetero plan` and `hetero doctor`: look, load nothing."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from hetero.config import Settings, format_size


def devices(as_json: bool) -> int:
    """List devices. Exit code 1 when ggml cannot be loaded."""
    from hetero.launch import LaunchError, list_devices

    try:
        found = list_devices()
    except LaunchError as exc:
        return fail(exc)
    if as_json:
        _print_json([dataclasses.asdict(d) for d in found])
        return 0
    rows = [
        (d.name, d.kind, f"{format_size(d.free_bytes)} of {format_size(d.total_bytes)} free", d.description)
        for d in found
    ]
    print_table(("name", "kind", "memory", "description"), rows)
    return 0


def plan(settings: Settings, as_json: bool) -> int:
    """Print the memory map. Exit code 1 when it does not fit."""
    from hetero.launch import LaunchError, prepare, require_fit

    try:
        prepared = prepare(settings)
    except LaunchError as exc:
        return fail(exc)
    made = prepared.plan
    if as_json:
        table = dataclasses.asdict(made) | {"fits": made.fits, "total_bytes": made.total_bytes}
        table |= {"model": str(prepared.model.path), "threads": prepared.choice.threads}
        _print_json(table)
        return 0 if made.fits else 1
    print(f"model      {prepared.model.path}")
    for stage in made.stages:
        first, last = stage.layers[0], stage.layers[1] - 1
        print(f"device     {stage.device}, {prepared.choice.threads} threads: layers {first} to {last}")
        sizes = (stage.weight_bytes, stage.kv_bytes, stage.compute_bytes, stage.total_bytes)
        for label, nbytes in zip(("weights", "KV cache", "compute", "total"), sizes, strict=True):
            print(f"  {label:9}{format_size(nbytes):>12}")
    print(f"free       {format_size(made.free_bytes)}")
    for group in made.groups:
        span = "all tokens" if group.window is None else f"a window of {group.window} tokens"
        print(f"KV blocks  {group.num_blocks}, for {len(group.layers)} layers that attend {span}")
    print(f"KV tokens  {made.kv_tokens}")
    print(f"context    {made.max_model_len}")
    for reason in made.reasons:
        print(f"why        {reason}")
    for note in made.notes:
        print(f"note       {note}")
    try:
        require_fit(prepared)
    except LaunchError as exc:
        return fail(exc)
    return 0


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
