"""All layers of a model through libllama, behind the interface of a stage. See backends.base.StageBackend."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from backends.base import BLOCK_SIZE, BatchLike, HostMemoryView
from backends.ggml.stage import StageError, StageSpec
from backends.llama.context import Context, DecodeError
from backends.llama.extra_buffers import extra_buffers_work
from backends.llama.sequences import Sequences
from backends.llama.spec import LlamaSpec
from quant.gguf import GGUFFile

Report = Callable[[int], None]  # bytes of weights that were loaded since the last call


class LlamaStage:
    """Not thread-safe: one worker drives it. The KV pools of `spec` are libllama's cache.

    Blocks are not moved or copied: what is in them is known by its tokens (see sequences.py).
    """

    def __init__(self, context: Context, spec: StageSpec, llama: LlamaSpec):
        self._context = context
        (num_blocks,) = spec.num_blocks
        self._tokens = np.zeros((num_blocks, BLOCK_SIZE), np.int32)  # of each block
        self.sequences = Sequences(self._context, llama.sequences, num_blocks, llama.keeps_prefixes)
        self._work = _Work(self._context, self.sequences)
        self._batch: BatchLike | None = None
        self._recomputed = 0
        self.graph_seconds = self.move_seconds = 0.0
        self.moved_bytes = 0
        self.argmax: np.ndarray | None = None

    def prepare(self, batch: BatchLike, hidden: np.ndarray | None) -> None:
        """See base.StageBackend."""
        assert hidden is None and not batch.spills and not batch.loads, "all layers, and no host memory"
        assert not batch.embeds, "nobody is promised embeddings here"
        for copy in batch.copies:
            self._tokens[copy.dst] = self._tokens[copy.src]
            self.sequences.block_changed(copy.dst)
        self._tokens.reshape(-1)[batch.slot_mapping[0]] = batch.input_ids
        self._batch = batch

    def compute(self) -> np.ndarray:
        """See base.StageBackend. Raises StageError; then nothing that was computed before is there."""
        assert self._batch is not None, "no step was prepared"
        batch, self._batch = self._batch, None
        start = time.perf_counter()
        try:
            logits = self._compute(batch)
        except DecodeError as error:
            self._work.drop()
            self.sequences.forget_all()
            raise StageError(str(error)) from None
        finally:
            self.graph_seconds = time.perf_counter() - start
        self.argmax = None
        if batch.only_argmax:
            self.argmax = _argmax(logits)
            return np.empty((0, self._context.n_vocab), np.float32)
        return logits

    @property
    def host_memory(self) -> HostMemoryView | None:
        return None

    def memory(self) -> dict[str, int]:
        return self._context.memory()

    def counters(self) -> dict[str, int]:
        """`recomputed_tokens`: of beginnings that should have been there."""
        return {"recomputed_tokens": self._recomputed}

    def check(self) -> None:
        """A device that is gone shows in the next step."""

    def close(self) -> None:
        self._context.close()

    def check_invariants(self) -> None:
        self.sequences.check_invariants()

    def _compute(self, batch: BatchLike) -> np.ndarray:
        self.sequences.begin_step()
        wanted = np.zeros(len(batch.positions), bool)
        wanted[batch.logits_rows] = True
        ends = batch.cu_seqlens_q.tolist()
        for table, first, end in zip(batch.block_tables[0], ends[:-1], ends[1:], strict=True):
            start = int(batch.positions[first])
            blocks = table[: -(-(start + end - first) // BLOCK_SIZE)]
            self._add(blocks, start, batch.input_ids[first:end], wanted[first:end])
        return self._work.finish()

    def _add(self, blocks: np.ndarray, start: int, ids: np.ndarray, wanted: np.ndarray) -> None:
        """One request's part of the step: `ids` from position `start` on."""
        known = self._tokens[blocks].reshape(-1)[:start]
        upto = blocks[: start // BLOCK_SIZE + 1]
        source, length = self.sequences.source(known, upto)
        if length and self._work.has(source):
            self._work.flush()  # what is to be shared must be there
        sequence, length = self.sequences.take(known, upto, source, length)
        self._recomputed += start - length
        ids = np.concatenate((known[length:], ids))
        wanted = np.concatenate((np.zeros(start - length, bool), wanted))
        self.sequences.extend(sequence, ids, blocks[start // BLOCK_SIZE :])
        self._work.add(sequence, length, ids, wanted)


class _Work:
    """Tokens that wait to be computed, in batches as large as the context takes."""

    def __init__(self, context: Context, sequences: Sequences):
        self._context, self._sequences = context, sequences
        self._parts: list[tuple[int, int, np.ndarray, np.ndarray]] = []  # sequence, position, ids, wanted
        self._count = 0
        self._logits: list[np.ndarray] = []

    def has(self, sequence: int) -> bool:
        return any(part[0] == sequence for part in self._parts)

    def add(self, sequence: int, position: int, ids: np.ndarray, wanted: np.ndarray) -> None:
        while len(ids):
            room = self._context.max_tokens - self._count
            if not room:
                self.flush()
                continue
            self._parts.append((sequence, position, ids[:room], wanted[:room]))
            self._count += len(ids[:room])
            position, ids, wanted = position + room, ids[room:], wanted[room:]

    def flush(self) -> None:
        """Raises DecodeError."""
        if not self._parts:
            return
        sequences, positions, ids, wanted = zip(*self._parts, strict=True)
        counts = [len(part) for part in ids]
        arrays = (
            np.concatenate(ids),
            np.concatenate([np.arange(at, at + n) for at, n in zip(positions, counts, strict=True)]),
            np.repeat(sequences, counts),
            np.concatenate(wanted),
        )
        self._parts, self._count = [], 0
        given = 1
        while (logits := self._context.decode(*arrays)) is None:
            if not self._sequences.give_up(given):
                raise DecodeError("libllama: its cache is full")
            given *= 2
        self._logits.append(logits)

    def finish(self) -> np.ndarray:
        """Compute what is left. Returns the logits of all that was added since the last time."""
        self.flush()
        logits, self._logits = self._logits, []
        if len(logits) == 1:
            return logits[0]
        return np.concatenate([np.empty((0, self._context.n_vocab), np.float32), *logits])

    def drop(self) -> None:
        self._parts, self._count, self._logits = [], 0, []


def open_stage(
    gguf: GGUFFile, spec: StageSpec, llama: LlamaSpec, report: Report = lambda nbytes: None
) -> LlamaStage:
    """Load the model. Raises DeviceError."""
    extra = extra_buffers_work({info.type for info in gguf.tensors.values()})
    loaded = _reporter(gguf, report)
    sizes = (spec.max_tokens, spec.max_logits)
    return LlamaStage(Context(gguf.path, llama, *sizes, extra, loaded, gguf.offset), spec, llama)


def _argmax(logits: np.ndarray) -> np.ndarray:
    """The largest of each row, -1 where that is not finite; a NaN is as large as any."""
    best = logits.argmax(axis=1).astype(np.int32)
    best[~np.isfinite(logits[np.arange(len(best)), best])] = -1
    return best


def _reporter(gguf: GGUFFile, report: Report) -> Callable[[float], None]:
    done = 0

    def loaded(share: float) -> None:
        nonlocal done
        now = int(share * gguf.nbytes)
        if now > done:
            report(now - done)
            done = now

    return loaded


__all__ = ["LlamaStage", "open_stage"]
