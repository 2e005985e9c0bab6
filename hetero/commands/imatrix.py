"""`hetero imatrix`: how strongly a text uses each column of each matrix, for `hetero quantize --imatrix`."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from hetero.commands.inspect import fail
from hetero.launch import open_observer
from hetero.prepare import LaunchError, Prepared
from hetero.screen import ProgressCallback, loading
from hetero.settings import Settings
from hetero.text.tokenizer import Tokenizer
from hetero.windows import WindowError, batches, cut, limited, prepare_model, read_tokens
from quant.imatrix_writer import save_imatrix


class ImatrixError(Exception):
    """The importance matrix cannot be collected or written: one line."""


def imatrix(
    settings: Settings, model: str, target: Path, text: Path, tokens: int, ctx: int, force: bool
) -> int:
    """Collect over the first `tokens` tokens of `text` and write `target`. Exit code 1 when that fails."""
    try:
        check_target(target, force)
        prepared = prepare_model(settings, model, ctx)
        tokenizer = Tokenizer(prepared.model.path)
        windows = cut(read_tokens(tokenizer, text, tokens), ctx, tokenizer)
        with loading() as progress:
            sums, counts = collect(settings, prepared, windows, progress)
        save_imatrix(target, sums, counts, windows.size, [text.name], ctx)
    except (LaunchError, WindowError, ImatrixError, ValueError) as exc:
        return fail(exc)
    except OSError as exc:
        return fail(ImatrixError(f"{target}: {exc.strerror or exc}"))
    except KeyboardInterrupt:
        return 1
    print(f"{target}: {len(sums)} matrices over {windows.size:,} tokens in {len(windows):,} windows")
    return 0


def check_target(target: Path, force: bool) -> None:
    """Find out before the work whether OUT can be written. Raises ImatrixError."""
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise ImatrixError(f"{target}: not a file in an existing folder")
    if target.exists() and not force:
        raise ImatrixError(f"{target}: the file exists; --force replaces it")


def collect(
    settings: Settings, prepared: Prepared, windows: np.ndarray, progress: ProgressCallback
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Sums of squared inputs by weight name, float64 [n], over windows int32 [W, ctx]; of experts [m, n], and
    how many inputs each of them had, int64 [m].

    Raises LaunchError, ImatrixError.
    """
    if prepared.native is None:
        raise ImatrixError(f"{prepared.model.path}: libllama computes it, and shows no inputs of weights")
    no_logits = np.empty(0, np.int64)
    with contextlib.ExitStack() as opened:
        runner, stage = open_observer(
            prepared,
            limited(settings, windows.shape[1]),
            lambda phase, done: progress(phase, 0.2 * done),
        )
        opened.callback(runner.close)
        for number, window in enumerate(windows):
            done = number / len(windows)
            progress(f"collecting, {int(10 * done) * 10} %", 0.2 + 0.8 * done)
            for batch in batches(prepared.plan.groups, window, no_logits):
                runner.submit(batch)
                result = runner.wait()
                assert result is not None
                if result.error is not None:
                    raise ImatrixError(f"computing failed: {result.error}")
        for name, values in stage.sums.items():
            if not np.isfinite(values).all():
                raise ImatrixError(f"{prepared.model.path}: the inputs of {name} are not finite")
        assert stage.tokens == windows.size
        return stage.sums, stage.counts
