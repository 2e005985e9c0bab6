"""`hetero quality MODEL --kv-type …`: what formats of the KV cache cost, against f16 of the same model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero.commands.inspect import fail
from hetero.commands.quality import (
    QualityError,
    check_memory,
    compare_all,
    distances,
    plus_minus,
    show_table,
)
from hetero.kv_types import F16, KVTypes
from hetero.prepare import LaunchError, Prepared
from hetero.screen import loading
from hetero.settings import Settings
from hetero.text.tokenizer import Tokenizer
from hetero.windows import WindowError, cut, prepare_model, read_tokens
from quant.quality import Bounds, Summary

if TYPE_CHECKING:
    import numpy as np

    from hetero.screen import ProgressCallback


@dataclass(frozen=True, slots=True)
class Formats:
    """What to compare: a model's formats, the text (None: the packaged one), how much, the windows' size."""

    model: str
    kv_types: tuple[KVTypes, ...]
    text: Path | None
    tokens: int
    ctx: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A format and what it cost. `kept` says what the devices had instead, where they have no such format."""

    kv_types: KVTypes
    kept: str
    summary: Summary

    @property
    def label(self) -> str:
        wanted = str(self.kv_types)
        return wanted if wanted == self.kept else f"{wanted} (kept as {self.kept})"


def quality(settings: Settings, wanted: Formats, bounds: Bounds, as_json: bool) -> int:
    """Print the comparison. Exit code 1 when it cannot be made or when a format breaks a bound."""
    try:
        models = prepare_formats(settings, wanted)
        tokenizer = Tokenizer(models[0].model.path)
        windows = cut(read_tokens(tokenizer, wanted.text, wanted.tokens), wanted.ctx, tokenizer)
        with loading() as progress:
            found = compare_formats(settings, models, wanted.kv_types, windows, progress)
    except (LaunchError, WindowError, QualityError, ValueError, OSError) as exc:
        return fail(exc)
    except KeyboardInterrupt:
        return 1
    broken = [f"{one.kv_types}: {line}" for one in found for line in bounds.broken(one.summary)]
    if as_json:
        report = _report(wanted, models[0], len(windows), found)
        print(json.dumps(report | {"broken": broken}, indent=2, ensure_ascii=False))
    else:
        _show(models[0], windows, found)
    for line in broken:
        fail(QualityError(line))
    return 1 if broken else 0


def prepare_formats(settings: Settings, wanted: Formats) -> list[Prepared]:
    """The model with an f16 KV cache, then with each of the formats. Raises LaunchError, WindowError."""
    models = [prepare_model(settings, wanted.model, wanted.ctx, types) for types in (F16, *wanted.kv_types)]
    check_memory(*models)
    return models


def compare_formats(
    settings: Settings,
    models: Sequence[Prepared],
    kv_types: Sequence[KVTypes],
    windows: np.ndarray,
    progress: ProgressCallback,
) -> list[Measured]:
    """Each of `kv_types` against f16, in one pass; `models` as prepare_formats has them."""
    summaries = compare_all(settings, models, ["f16", *map(str, kv_types)], windows, progress)
    return [
        Measured(types, " and ".join(dict.fromkeys(str(s.kv_types) for s in model.plan.stages)), summary)
        for types, model, summary in zip(kv_types, models[1:], summaries, strict=True)
    ]


def _report(wanted: Formats, model: Prepared, windows: int, found: Sequence[Measured]) -> dict[str, Any]:
    """The comparison for a program to read."""
    return {
        "text": None if wanted.text is None else str(wanted.text),
        "ctx": wanted.ctx,
        "windows": windows,
        "tokens_scored": found[0].summary.tokens,
        "model": str(model.model.path),
        "perplexity": dataclasses.asdict(found[0].summary.reference_ppl),
        "formats": [
            {
                "kv_type": str(one.kv_types),
                "kept": one.kept,
                "perplexity": dataclasses.asdict(one.summary.other_ppl),
                **distances(one.summary),
            }
            for one in found
        ],
    }


def _show(model: Prepared, windows: np.ndarray, found: Sequence[Measured]) -> None:
    summary = found[0].summary
    count, ctx = windows.shape
    print(f"model       {model.model.path}")
    print(f"perplexity  {plus_minus(summary.reference_ppl, 4)} with f16")
    print(f"tokens      {summary.tokens:,} scored in {count:,} windows of {ctx:,}\n")
    header = ("KV cache", "KL divergence, mean", "99 % are below", "same likeliest token", "perplexity ratio")
    show_table(header, [table_row(one) for one in found])


def table_row(one: Measured) -> tuple[str, ...]:
    """A format, its mean KL divergence in nats, the 99th percentile, top-1 agreement, perplexity ratio."""
    s = one.summary
    return (
        one.label,
        plus_minus(s.kl_mean, 6),
        f"{s.kl_p99:.6f}",
        f"{100 * s.top1:.2f} %",
        plus_minus(s.ppl_ratio, 5),
    )


__all__ = ["Formats", "Measured", "compare_formats", "prepare_formats", "quality", "table_row"]
