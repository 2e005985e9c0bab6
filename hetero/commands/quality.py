"""`hetero quality`: how far a model's predictions are from another's, over a text.

The text is cut into windows (hetero.windows). The second half of each is scored, where every token has
at least ctx / 2 tokens before it. llama.cpp's llama-perplexity does the same, so that its numbers can be
compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hetero.commands.inspect import fail, print_table
from hetero.launch import open_runner
from hetero.plan.facts import quantization
from hetero.plan.sizes import SPARE
from hetero.prepare import LaunchError, Prepared
from hetero.screen import ProgressCallback, loading
from hetero.settings import Settings
from hetero.sizes import format_size
from hetero.text.tokenizer import Tokenizer
from hetero.windows import WindowError, batches, cut, limited, prepare_model, read_tokens
from quant.quality import Bounds, Comparison, Estimate, NotFiniteError, Summary

if TYPE_CHECKING:
    from hetero.kv.groups import KVGroup
    from hetero.pipeline.runner import Runner

TOKENS_KEY = "tokenizer.ggml.tokens"
LOADING = 0.2  # of the progress
Run = tuple["Runner", tuple["KVGroup", ...]]


class QualityError(Exception):
    """The models cannot be compared: one line."""


@dataclass(frozen=True, slots=True)
class Comparand:
    """What to compare: two models, the text (None: the packaged one), how much of it, the windows' size."""

    reference: str
    other: str
    text: Path | None
    tokens: int
    ctx: int


def quality(settings: Settings, wanted: Comparand, bounds: Bounds, as_json: bool) -> int:
    """Print the comparison. Exit code 1 when it cannot be made or when a bound is broken."""
    try:
        reference, other = (prepare_model(settings, m, wanted.ctx) for m in (wanted.reference, wanted.other))
        check_vocabularies(reference, other)
        check_memory(reference, other)
        tokenizer = Tokenizer(reference.model.path)
        windows = cut(read_tokens(tokenizer, wanted.text, wanted.tokens), wanted.ctx, tokenizer)
        with loading() as progress:
            found = compare(settings, reference, other, windows, progress)
    except (LaunchError, WindowError, QualityError, ValueError, OSError) as exc:
        return fail(exc)
    except KeyboardInterrupt:
        return 1
    broken = bounds.broken(found)
    if as_json:
        report = _report(wanted, reference, other, len(windows), found)
        print(json.dumps(report | {"broken": broken}, indent=2, ensure_ascii=False))
    else:
        _show(reference, other, windows, found)
    for line in broken:
        fail(QualityError(line))
    return 1 if broken else 0


def check_vocabularies(reference: Prepared, other: Prepared) -> None:
    """Raise QualityError unless both models give the same meaning to the same ids."""
    paths = f"{reference.model.path} and {other.model.path}"
    sizes = reference.config.n_vocab, other.config.n_vocab
    if sizes[0] != sizes[1]:
        raise QualityError(f"{paths} have different vocabularies: {sizes[0]} and {sizes[1]} tokens")
    texts = [p.gguf.metadata.get(TOKENS_KEY) for p in (reference, other)]
    for prepared, found in zip((reference, other), texts, strict=True):
        if not isinstance(found, list) and not hasattr(found, "__getitem__"):
            raise QualityError(f"{prepared.model.path}: the file has no vocabulary ({TOKENS_KEY})")
    first, second = (list(t) for t in texts)  # type: ignore[call-overload]
    if first == second:
        return
    pairs = enumerate(zip(first, second, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
    shown = (repr(t[at]) if at < len(t) else "missing" for t in (first, second))
    raise QualityError(f"{paths} have different vocabularies: token {at} is " + " and ".join(shown))


def check_memory(*models: Prepared) -> None:
    """Raise LaunchError unless all fit side by side: they are computed in turns, chunk by chunk."""
    needed = sum(model.plan.total_bytes for model in models)
    usable = int(models[0].plan.free_bytes * SPARE)
    if needed > usable:
        all_of_them = "both models" if len(models) == 2 else f"the model {len(models)} times"
        raise LaunchError(
            f"not enough memory on {models[0].choice.device.name} for {all_of_them}: they need "
            f"{format_size(needed)}, {format_size(needed - usable)} more than can be used"
        )


def compare(
    settings: Settings, reference: Prepared, other: Prepared, windows: np.ndarray, progress: ProgressCallback
) -> Summary:
    """Load both models and run them side by side. Raises LaunchError, QualityError."""
    names = ("the reference", "the other model")
    return compare_all(settings, (reference, other), names, windows, progress)[0]


def compare_all(
    settings: Settings,
    models: Sequence[Prepared],
    names: Sequence[str],
    windows: np.ndarray,
    progress: ProgressCallback,
) -> list[Summary]:
    """Compare the first model with each of the others in one pass over the windows int32 [W, ctx].

    Never more than one chunk's logits of each model exist. Raises LaunchError, QualityError.
    """
    small = limited(settings, windows.shape[1])
    comparisons, share = [Comparison() for _ in models[1:]], LOADING / len(models)
    with contextlib.ExitStack() as opened:
        runs: list[Run] = []
        for i, (prepared, name) in enumerate(zip(models, names, strict=True)):
            runner = open_runner(prepared, small, _part(progress, name, i * share, share))
            opened.callback(runner.close)
            runs.append((runner, prepared.plan.groups))
        pool = opened.enter_context(ThreadPoolExecutor(len(comparisons)))  # numpy lets go of the GIL
        for number, window in enumerate(windows):
            done = number / len(windows)
            progress(f"comparing, {int(10 * done) * 10} %", LOADING + (1 - LOADING) * done)
            _score(comparisons, runs, window, models, number, pool)
    return [comparison.summary() for comparison in comparisons]


def _part(progress: ProgressCallback, label: str, start: float, share: float) -> Callable[[str, float], None]:
    return lambda text, done: progress(f"{label}: {text}", start + share * done)


def _score(
    comparisons: Sequence[Comparison],
    runs: Sequence[Run],
    window: np.ndarray,
    models: Sequence[Prepared],
    number: int,
    pool: ThreadPoolExecutor,
) -> None:
    """Compute a window with all models and take in its second half."""
    for chunks in zip(*(_logits(runner, groups, window) for runner, groups in runs), strict=True):
        (rows, first), *others = chunks
        targets = window[rows + 1]
        added = [
            pool.submit(comparison.add, first, other, targets)
            for comparison, (_, other) in zip(comparisons, others, strict=True)
        ]
        for model, one in zip(models[1:], added, strict=True):
            try:
                one.result()
            except NotFiniteError as exc:
                path = (models[0] if exc.of_reference else model).model.path
                place = f"window {number + 1}, position {rows[exc.row]}"
                raise QualityError(f"{path} gives logits that are not finite ({place})") from None


def _logits(
    runner: Runner, groups: tuple[KVGroup, ...], window: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(positions int [L], logits float32 [L, V]) of the scored ones, chunk by chunk.

    The logits are valid until the next chunk is asked for. The last position is not scored: no token
    follows it.
    """
    scored = np.arange(len(window) // 2, len(window) - 1)
    for batch in batches(groups, window, scored):
        rows = batch.positions[batch.logits_rows]
        runner.submit(batch)
        result = runner.wait()
        assert result is not None
        if result.error is not None or result.logits is None:
            raise QualityError(f"computing failed: {result.error}")
        yield rows, result.logits


def _report(
    wanted: Comparand, reference: Prepared, other: Prepared, windows: int, found: Summary
) -> dict[str, Any]:
    """The comparison for a program to read."""
    models = {
        key: {
            "path": str(model.model.path),
            "quantization": quantization(model.gguf),
            "size_bytes": model.gguf.nbytes,
            "perplexity": dataclasses.asdict(ppl),
        }
        for key, model, ppl in (
            ("reference", reference, found.reference_ppl),
            ("other", other, found.other_ppl),
        )
    }
    return {
        "text": None if wanted.text is None else str(wanted.text),
        "ctx": wanted.ctx,
        "windows": windows,
        "tokens_scored": found.tokens,
        **models,
        **distances(found),
    }


def distances(found: Summary) -> dict[str, Any]:
    """How far apart two models are, as --json prints it."""
    return {
        "ppl_ratio": dataclasses.asdict(found.ppl_ratio),
        "kl": {
            "mean": found.kl_mean.value,
            "mean_error": found.kl_mean.error,
            "p90": found.kl_p90,
            "p99": found.kl_p99,
            "max": found.kl_max,
        },
        "top1_agreement": found.top1,
    }


def _show(reference: Prepared, other: Prepared, windows: np.ndarray, found: Summary) -> None:
    header = ("", "reference", "other")
    models = (reference, other)
    rows = [
        ("model", *(m.model.name for m in models)),
        ("format", *(quantization(m.gguf) for m in models)),
        ("size", *(format_size(m.gguf.nbytes) for m in models)),
        ("perplexity", plus_minus(found.reference_ppl, 4), plus_minus(found.other_ppl, 4)),
        ("perplexity ratio", "", plus_minus(found.ppl_ratio, 5)),
        ("KL divergence, mean", "", f"{plus_minus(found.kl_mean, 6)} nats"),
        ("  90 % are below", "", f"{found.kl_p90:.6f}"),
        ("  99 % are below", "", f"{found.kl_p99:.6f}"),
        ("  largest", "", f"{found.kl_max:.6f}"),
        ("same likeliest token", "", f"{100 * found.top1:.2f} %"),
        ("tokens scored", "", f"{found.tokens:,} in {len(windows):,} windows of {windows.shape[1]:,}"),
    ]
    show_table(header, rows)


def show_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """A table for people; with colours on a terminal."""
    if not sys.stdout.isatty():
        print_table(header, rows)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in header:
        table.add_column(column)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    Console(highlight=False).print(table)


def plus_minus(estimate: Estimate, digits: int) -> str:
    return f"{estimate.value:.{digits}f} ± {estimate.error:.{digits}f}"
