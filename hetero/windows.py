"""A text as windows of tokens that a model computes one after the other, for measuring rather than serving.

The text's tokens are cut into windows of `ctx` tokens, each computed on its own. A window starts with
the BOS token in place of its first where the model wants one; a last window that is not full is left
out. llama.cpp's tools cut texts in the same way.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hetero.batch import Batch
from hetero.files import unreadable
from hetero.kv.groups import KVGroup
from hetero.kv_types import F16, KVTypes
from hetero.plan.planner import BLOCK_SIZE
from hetero.prepare import Prepared, prepare, require_fit
from hetero.settings import OFF, Settings
from hetero.text.tokenizer import Tokenizer

CHUNK = 64  # tokens in a step; bounds the memory for logits (64 MiB at 262,144 tokens of vocabulary)
CHARS_PER_TOKEN = 32  # of a long text, the part that is read for each token wanted


class WindowError(Exception):
    """The text or the model does not allow such windows: one line."""


def limited(settings: Settings, ctx: int) -> Settings:
    """One window in the KV cache, and steps of a chunk that may want the logits of all its tokens."""
    return replace(
        settings,
        ctx=ctx,
        kv_tokens=ctx,
        kv_memory=0,
        ram_cache=OFF,
        max_num_seqs=CHUNK,
        max_num_batched_tokens=CHUNK,
    )


def prepare_model(settings: Settings, model: str, ctx: int, kv_types: KVTypes = F16) -> Prepared:
    """A model that fits with one window in its cache, whose format is not the settings' but `kv_types`.

    Raises LaunchError, WindowError.
    """
    prepared = prepare(limited(replace(settings, model=model, kv_type=kv_types), ctx))
    limit = prepared.config.n_ctx_train
    if ctx > limit:
        raise WindowError(f"--ctx {ctx} is more than {prepared.model.path} was trained for: {limit}")
    require_fit(prepared)
    return prepared


def read_tokens(tokenizer: Tokenizer, path: Path | None, limit: int) -> list[int]:
    """The first `limit` tokens of the file, of the packaged text without one. Control tokens are text.

    Raises WindowError.
    """
    if path is None:
        resource = importlib.resources.files("hetero") / "data" / "quality.txt"
        text = resource.read_text(encoding="utf-8")
    else:
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(CHARS_PER_TOKEN * limit)
        except (OSError, UnicodeDecodeError) as exc:
            raise WindowError(f"--text {path}: {unreadable(exc)}") from None
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    return (bos + tokenizer.encode(text, parse_special=False, add_special=False))[:limit]


def cut(ids: Sequence[int], ctx: int, tokenizer: Tokenizer) -> np.ndarray:
    """Full windows of the text, int32 [W, ctx]. Raises WindowError when there is none."""
    count = len(ids) // ctx
    if not count:
        raise WindowError(f"the text has {len(ids)} tokens, less than one window of --ctx {ctx}")
    windows = np.array(ids[: count * ctx], np.int32).reshape(count, ctx)
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        windows[:, 0] = tokenizer.bos_id
    return windows


def batches(groups: Sequence[KVGroup], window: np.ndarray, wanted: np.ndarray) -> Iterator[Batch]:
    """The steps that compute a window int32 [ctx], with the logits of the positions `wanted`, ascending.

    The window's blocks go round each group's pool (block 0 is scratch). Only a windowed group's pool
    can be smaller than the window, and then it holds far more than what is attended (see
    planner.kv_groups).
    """
    for start in range(0, len(window), CHUNK):
        end = min(start + CHUNK, len(window))
        positions = np.arange(start, end, dtype=np.int32)
        blocks = np.arange(-(-end // BLOCK_SIZE), dtype=np.int32)
        tables = [1 + blocks % (group.num_blocks - 1) for group in groups if not group.recurrent]
        batch = Batch(
            step_id=0,
            input_ids=window[start:end],
            positions=positions,
            slot_mapping=[t[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE for t in tables],
            block_tables=[table[None, :] for table in tables],
            context_lens=np.array([end], np.int32),
            cu_seqlens_q=np.array([0, end - start], np.int32),
            logits_rows=(wanted[(wanted >= start) & (wanted < end)] - start).astype(np.int32),
            copies=[],
        )
        if any(group.recurrent for group in groups):
            batch.state_sources = np.array([1 if start else 0], np.int32)
            batch.state_writes = np.array([[0, end - start, 1]], np.int32)
        yield batch
