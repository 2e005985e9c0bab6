"""`hetero quantize`: a smaller copy of a model, and what it costs in bits."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.commands.inspect import fail, print_table
from hetero.commands.signals import ending_on_sigterm
from hetero.models import ModelError, resolve
from hetero.plan.devices import usable_cores
from hetero.quantizer import (
    Fallback,
    Job,
    Plan,
    QuantizeError,
    Quantizer,
    TensorPlan,
    size_of_output,
    write_atomically,
)
from hetero.quantizer_child import ALIGNMENT
from hetero.screen import format_count, loading
from hetero.sizes import format_size
from quant.ftypes import FLOAT_FTYPES, FTYPES, TENSOR_TYPES
from quant.gguf import GGUFError, GGUFFile, open_gguf
from quant.imatrix import load_imatrix
from quant.types import TYPE_IDS


@dataclass(frozen=True, slots=True)
class Request:
    """The command line. `type_name` is a mixture of quant.ftypes; `tensor_types` are REGEX=TYPE."""

    source: str
    target: Path | None
    type_name: str
    tensor_types: tuple[str, ...] = ()
    imatrix: Path | None = None
    threads: int | None = None
    allow_requantize: bool = False
    strict: bool = False
    force: bool = False
    dry_run: bool = False
    as_json: bool = False


class UsageError(ValueError):
    """An argument that cannot be right for any file."""


def quantize(request: Request) -> int:
    """Quantize, or with `dry_run` only say how. Exit code 1, and one line, on failure; 2 for bad usage."""
    try:
        ftype, overrides = _types(request)
        with ending_on_sigterm():
            return _quantize(request, ftype, overrides)
    except UsageError as exc:
        fail(exc)
        return 2
    except (ModelError, GGUFError, QuantizeError) as exc:
        return fail(exc)
    except KeyboardInterrupt:
        return fail(QuantizeError("interrupted; nothing was written"))


def _quantize(request: Request, ftype: int, overrides: tuple[tuple[str, int], ...]) -> int:
    with loading() as progress:
        path = resolve(request.source, progress=progress).path
    with open_gguf(path) as source:
        if request.target is not None and not request.dry_run:
            _check_target(request.target, source.paths, request.force)
        if not source.tensors:
            raise QuantizeError(f"{path}: there are no tensors in it")
        _check_patterns(overrides, source)
        if request.imatrix is not None:
            load_imatrix(request.imatrix)
        job = Job(
            path,
            ftype,
            request.threads or usable_cores(),
            overrides,
            request.imatrix,
            request.allow_requantize,
            realign=source.metadata.get("general.alignment", ALIGNMENT) != ALIGNMENT,
        )
        started = time.monotonic()
        with Quantizer(source, job) as quantizer:
            plan = quantizer.plan()
            if request.strict and plan.fallbacks:
                return _refuse_fallbacks(request, path, plan)
            if request.target is not None and not request.dry_run:
                _require_source(request, plan)
                with loading() as progress:
                    what = f"quantizing to {request.type_name}"
                    write_atomically(
                        request.target,
                        size_of_output(source, plan),
                        request.force,
                        lambda part: quantizer.write(part, plan, lambda done: progress(what, done)),
                    )
            notes = _notes(request, plan, quantizer.without_imatrix)
    _show(request, path, plan, notes, time.monotonic() - started)
    return 0


def _types(request: Request) -> tuple[int, tuple[tuple[str, int], ...]]:
    name = request.type_name
    if name not in FTYPES:
        raise UsageError(f"--type {name}: not a type that files can have; these are: {', '.join(FTYPES)}")
    if request.tensor_types and name in FLOAT_FTYPES:
        raise UsageError(f"--tensor-type has no effect with --type {name}, which gives all matrices one type")
    overrides = []
    for text in request.tensor_types:
        pattern, _, wanted = text.rpartition("=")
        if not pattern or wanted.upper() not in TENSOR_TYPES:
            raise UsageError(
                f"--tensor-type {text}: give REGEX=TYPE with one of these types: {', '.join(TENSOR_TYPES)}"
            )
        try:
            re.compile(pattern)
        except re.error as exc:
            raise UsageError(f"--tensor-type {text}: not a regular expression: {exc}") from None
        overrides.append((pattern, TYPE_IDS[wanted.upper()]))
    return FTYPES[name], tuple(overrides)


def _check_target(target: Path, sources: list[Path], force: bool) -> None:
    """Raises QuantizeError when the output cannot be put at `target`."""
    if not target.parent.is_dir():
        raise QuantizeError(f"{target}: there is no folder {target.parent}")
    if not target.exists():
        return
    if any(target.samefile(source) for source in sources):
        raise QuantizeError(f"{target}: is the file to be quantized itself")
    if not target.is_file():
        raise QuantizeError(f"{target}: is not a file")
    if not force:
        raise QuantizeError(f"{target}: exists already; --force replaces it")


def _check_patterns(overrides: tuple[tuple[str, int], ...], source: GGUFFile) -> None:
    for pattern, _ in overrides:
        if not any(re.search(pattern, name) for name in source.tensors):
            raise QuantizeError(f"--tensor-type {pattern}: {source.path} has no tensor of such a name")


def _require_source(request: Request, plan: Plan) -> None:
    """Raises QuantizeError when the result would be worse than it looks, and nobody asked for that."""
    if plan.needs_imatrix:
        raise QuantizeError(f"{request.type_name} needs an importance matrix: give one with --imatrix")
    if plan.requantized and not request.allow_requantize:
        counts = ", ".join(f"{n} tensors in {name}" for name, n in plan.requantized.items())
        raise QuantizeError(
            f"{request.source}: already quantized ({counts}), and quantizing again adds a second error "
            "to the first; start from the F16 or BF16 file, or give --allow-requantize"
        )


def _refuse_fallbacks(request: Request, path: Path, plan: Plan) -> int:
    if request.as_json:
        _print_json(request, path, plan, [])
    else:
        _print_fallbacks(plan.fallbacks)
    n = len(plan.fallbacks)
    return fail(QuantizeError(f"--strict: {n} tensors of {path} cannot have the type asked for"))


def _notes(request: Request, plan: Plan, without_imatrix: list[str]) -> list[str]:
    notes = []
    if request.dry_run and plan.requantized and not request.allow_requantize:
        notes.append("the file is quantized already: doing this takes --allow-requantize")
    if plan.needs_imatrix:
        notes.append("doing this takes an importance matrix (--imatrix)")
    if without_imatrix:
        notes.append(f"the importance matrix has nothing about {', '.join(without_imatrix)}")
    return notes


def _show(request: Request, path: Path, plan: Plan, notes: list[str], seconds: float) -> None:
    if request.as_json:
        _print_json(request, path, plan, notes)
        return
    if request.dry_run:
        print_table(
            ("tensor", "shape", "from", "to", "size", "bits per weight"), list(map(_row, plan.tensors))
        )
    if plan.fallbacks:
        _print_fallbacks(plan.fallbacks)
    for note in notes:
        print(f"note: {note}")
    print(
        f"{request.target or path.name}: {format_count(plan.weights)} weights, "
        f"{format_size(plan.bytes_before)} -> {format_size(plan.bytes_after)}, "
        f"{_bits(plan.bytes_before, plan.weights)} -> {_bits(plan.bytes_after, plan.weights)} bits per weight"
        + (" (nothing was written)" if request.dry_run else f", in {seconds:.1f} s")
    )


def _row(t: TensorPlan) -> tuple[str, ...]:
    shape = " x ".join(map(str, t.shape))
    return t.name, shape, t.source, t.target, format_size(t.bytes_after), _bits(t.bytes_after, t.weights)


def _print_fallbacks(fallbacks: tuple[Fallback, ...]) -> None:
    rows = [(f.name, str(f.row_length), f.asked, f.used) for f in fallbacks]
    print_table(("tensor that cannot have its type", "row length", "asked for", "gets"), rows)


def _bits(nbytes: int, weights: int) -> str:
    return f"{nbytes * 8 / weights:.2f}"


def _print_json(request: Request, path: Path, plan: Plan, notes: list[str]) -> None:
    table: dict[str, Any] = {
        "input": str(path),
        "output": None if request.target is None else str(request.target),
        "type": request.type_name,
        "dry_run": request.dry_run,
        "weights": plan.weights,
        "bytes_before": plan.bytes_before,
        "bytes_after": plan.bytes_after,
        "bits_per_weight": plan.bytes_after * 8 / plan.weights,
        "fallbacks": [dataclasses.asdict(f) for f in plan.fallbacks],
        "tensors": [
            dataclasses.asdict(t) | {"bits_per_weight": t.bytes_after * 8 / t.weights} for t in plan.tensors
        ],
        "notes": notes,
    }
    print(json.dumps(table, indent=2, ensure_ascii=False))
