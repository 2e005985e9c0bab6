"""libllama's quantizer in a process of its own: an assertion that fails in it ends only that process."""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ALIGNMENT = 32  # libllama pads tensors to this, whatever the file it reads says


@dataclass(frozen=True, slots=True)
class Job:
    """What to quantize and how. `ftype` is an id of quant.ftypes; `overrides` are (regex, ggml type id).

    `realign` for a source whose tensors are padded to something else than ALIGNMENT.
    """

    source: Path
    ftype: int
    threads: int
    overrides: tuple[tuple[str, int], ...] = ()
    imatrix: Path | None = None
    allow_requantize: bool = False
    realign: bool = False


def serve(connection: Connection, job: Job) -> None:
    """Answer each output path that comes (None: a dry run) with ("log", text) …, ("done", return code).

    An assertion of ggml arrives as ("abort", text), and the process ends.
    """
    os.environ["GGML_NO_BACKTRACE"] = "1"  # it would start a debugger
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    from llama_cpp import llama_cpp as llama

    output: Path | None = None

    def send(kind: str, value: Any) -> None:
        try:
            connection.send((kind, value))
        except OSError:  # the parent is gone: nobody wants the file
            if output is not None:
                output.unlink(missing_ok=True)
            os._exit(1)

    log = llama.llama_log_callback(lambda level, text, data: send("log", text.decode("utf-8", "replace")))
    llama.llama_log_set(log, ctypes.c_void_p(0))
    keep = _on_abort(lambda text: send("abort", text))
    params, kept = _parameters(llama, job)
    with contextlib.suppress(EOFError, OSError):
        while True:
            output = connection.recv()
            params.dry_run = output is None
            out = b"" if output is None else os.fsencode(output)
            send("done", llama.llama_model_quantize(os.fsencode(job.source), out, ctypes.byref(params)))
    del keep, kept


def _on_abort(report: Any) -> Any:
    """Have ggml report a failed assertion before it ends the process. The result must be kept alive."""
    import llama_cpp

    folder = Path(llama_cpp.__file__).parent / "lib"
    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda text: report(text.decode("utf-8", "replace")))
    for path in (*folder.glob("libggml-base.*"), *folder.glob("ggml-base.dll")):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(path))
            library.ggml_set_abort_callback.restype = ctypes.c_void_p
            library.ggml_set_abort_callback(callback)
            break
    return callback


def _parameters(llama: Any, job: Job) -> tuple[Any, list[Any]]:
    """llama_model_quantize_params of the job, and the arrays that it points to."""
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.nthread = job.ftype, job.threads
    params.allow_requantize = job.allow_requantize
    kept: list[Any] = []
    if job.overrides:
        rows = [(pattern.encode(), type_id) for pattern, type_id in job.overrides]
        overrides = (llama.llama_model_tensor_override * (len(rows) + 1))(*rows, (None, 0))
        params.tt_overrides = overrides
        kept.append(overrides)
    if job.imatrix is not None:
        from quant.imatrix import load_imatrix

        entries = load_imatrix(job.imatrix)
        matrix = (llama.llama_model_imatrix_data * (len(entries) + 1))()
        for row, (name, values) in zip(matrix, entries.items(), strict=False):
            row.name, row.size = name.encode(), values.size
            row.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        params.imatrix = matrix
        kept += [matrix, entries]
    if job.realign:  # libllama would copy the source's value into the metadata, but not keep to it
        alignment = (llama.llama_model_kv_override * 2)()
        alignment[0].tag, alignment[0].key = llama.LLAMA_KV_OVERRIDE_TYPE_INT, b"general.alignment"
        alignment[0].value.val_i64 = ALIGNMENT
        params.kv_overrides = alignment
        kept.append(alignment)
    return params, kept
