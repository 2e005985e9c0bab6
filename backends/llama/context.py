"""A model and a context of libllama: tokens of many sequences in, logits out."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from backends.ggml.devices import DeviceError, open_device
from backends.llama.library import Log, libllama, opened_at
from backends.llama.spec import LlamaSpec
from quant.types import TYPE_IDS

NO_ROOM = 1  # llama_decode: no cells for the tokens; nothing has changed
Progress = Callable[[float], None]  # the share of the weights that is loaded


class DecodeError(RuntimeError):
    """libllama could not compute a batch. One line."""


class Context:
    """One model in memory. Not thread-safe; always the same thread should compute.

    Raises DeviceError, with libllama's reason, where the model cannot be loaded. A batch has at most
    `max_tokens` tokens and `max_rows` rows of logits.
    """

    def __init__(
        self,
        path: Path,
        spec: LlamaSpec,
        max_tokens: int,
        max_rows: int,
        extra_buffers: bool,
        progress: Progress = lambda share: None,
        offset: int = 0,
    ):
        """The model begins at byte `offset` of the file at `path`."""
        self._llama = libllama()
        self._log = Log()
        self._llama.llama_backend_init()
        self.max_tokens = max(max_tokens, spec.sequences)
        self._model = self._context = None
        try:
            self._model = self._load(path, offset, spec, extra_buffers, progress)
            self._context = self._open(spec, max(max_rows, spec.sequences))
        except BaseException:
            self.close()
            raise
        self.n_vocab: int = self._llama.llama_vocab_n_tokens(self._llama.llama_model_get_vocab(self._model))
        self._memory = self._llama.llama_get_memory(self._context)
        self._batch = _Batch(self._llama, self.max_tokens)

    def decode(
        self, ids: np.ndarray, positions: np.ndarray, sequences: np.ndarray, wanted: np.ndarray
    ) -> np.ndarray | None:
        """Compute n tokens, each of one sequence and in its order.

        int32 [n] each, `wanted` bool [n]. Returns float32 [rows, n_vocab], the logits of the wanted ones in
        their order; None where the cache has no room for all, and then nothing was done. DecodeError.
        """
        status = self._llama.llama_decode(self._context, self._batch.fill(ids, positions, sequences, wanted))
        if status == NO_ROOM:
            self._log.errors.clear()
            return None
        if status:
            raise DecodeError(f"libllama: {self._log.reason(f'status {status}')}")
        rows = np.flatnonzero(wanted)
        out = np.empty((len(rows), self.n_vocab), np.float32)
        for row, index in zip(out, rows.tolist(), strict=True):
            found = self._llama.llama_get_logits_ith(self._context, index)
            if not found:
                raise DecodeError(f"libllama: {self._log.reason('no logits')}")
            ctypes.memmove(row.ctypes.data, found, row.nbytes)
        self._llama.llama_synchronize(self._context)
        return out

    def copy(self, source: int, target: int, length: int) -> None:
        """Give an empty sequence the first `length` tokens of another; the cells are shared."""
        self._llama.llama_memory_seq_cp(self._memory, source, target, 0, length)

    def cut(self, sequence: int, length: int) -> bool:
        """Keep the first `length` tokens. False where this memory cannot: then nothing has changed."""
        return bool(self._llama.llama_memory_seq_rm(self._memory, sequence, length, -1))

    def memory(self) -> dict[str, int]:
        """Bytes of the buffers that libllama has made: weights, kv, compute, host."""
        made = self._log.buffers
        return {
            "weights": self._llama.llama_model_size(self._model),
            "kv": made["KV"] + made["RS"],
            "compute": made["compute"] + made["output"],
            "host": 0,
        }

    def close(self) -> None:
        """Free everything. Idempotent."""
        if self._context:
            self._llama.llama_free(self._context)
        if self._model:
            self._llama.llama_model_free(self._model)
        self._context = self._model = None

    def _load(self, path: Path, offset: int, spec: LlamaSpec, extra_buffers: bool, progress: Progress) -> Any:
        params = self._llama.llama_model_default_params()
        handles = _handles(spec)
        params.devices = ctypes.cast(handles, ctypes.c_void_p)
        params.n_gpu_layers = sum(spec.layers) + 1 if spec.devices else 0  # with the output head
        shares = _shares(spec.layers, self._llama.llama_max_devices())
        params.tensor_split = shares
        params.use_extra_bufts = extra_buffers

        def loaded(share: float, data: Any) -> bool:
            progress(share)
            return True

        callback = self._llama.llama_progress_callback(loaded)
        params.progress_callback = callback
        if offset:
            with opened_at(path, offset) as file:
                model = self._llama.llama_model_load_from_file_ptr(file, params)
        else:  # by name, so that the parts of a split model are found
            model = self._llama.llama_model_load_from_file(os.fsencode(path), params)
        if not model:
            reason = self._log.reason("libllama gave no reason")
            raise DeviceError(f"{path.name}: libllama cannot load it: {reason}; is the file whole?")
        return model

    def _open(self, spec: LlamaSpec, max_rows: int) -> Any:
        params = self._llama.llama_context_default_params()
        params.n_ctx = spec.cells
        params.n_batch = self.max_tokens
        params.n_ubatch = min(self.max_tokens, 512)
        params.n_seq_max = spec.sequences
        params.n_outputs_max = max_rows
        params.kv_unified = True  # cells belong to no sequence, so that they can be shared
        params.swa_full = True  # else what a window has passed is gone for those that share it
        params.type_k, params.type_v = TYPE_IDS[spec.key_type.upper()], TYPE_IDS[spec.value_type.upper()]
        params.no_perf = True
        if spec.threads:
            params.n_threads = params.n_threads_batch = spec.threads
        context = self._llama.llama_init_from_model(self._model, params)
        if not context:
            reason = self._log.reason("there is no memory for its cache")
            raise DeviceError(f"libllama cannot run this model: {reason}")
        return context


class _Batch:
    """llama_batch over arrays of ours, whose addresses stay."""

    def __init__(self, llama: Any, size: int):
        self._struct = llama.llama_batch()
        self._ids, self._positions, self._sequences, self._ones = (np.ones(size, np.int32) for _ in range(4))
        self._wanted = np.zeros(size, np.int8)
        self._pointers = self._sequences.ctypes.data + 4 * np.arange(size, dtype=np.uint64)
        for name, array in (
            ("token", self._ids),
            ("pos", self._positions),
            ("n_seq_id", self._ones),
            ("seq_id", self._pointers),
            ("logits", self._wanted),
        ):
            kind = dict(self._struct._fields_)[name]
            setattr(self._struct, name, ctypes.cast(array.ctypes.data, kind))

    def fill(self, ids: np.ndarray, positions: np.ndarray, sequences: np.ndarray, wanted: np.ndarray) -> Any:
        count = len(ids)
        self._ids[:count], self._positions[:count] = ids, positions
        self._sequences[:count], self._wanted[:count] = sequences, wanted
        self._struct.n_tokens = count
        return self._struct


def _handles(spec: LlamaSpec) -> Any:
    """A NULL-terminated array of ggml's devices; empty it means: the CPU alone."""
    handles = []
    for device in spec.devices:
        opened = open_device(device)  # to find it; libllama opens it itself
        handles.append(opened.handle)
        opened.close()
    return (ctypes.c_void_p * (len(handles) + 1))(*handles, None)


def _shares(layers: Sequence[int], most: int) -> Any:
    """libllama counts the output head as one more layer, of the last device."""
    counts = [*layers[:-1], layers[-1] + 1] if layers else []
    return (ctypes.c_float * max(most, len(counts), 1))(*counts)


__all__ = ["Context", "DecodeError"]
