"""libllama as llama-cpp-python binds it, over the same ggml that everything else uses."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from backends.ggml.lib import ggml
from quant.gguf_writer import gguf_head

LOG_ERROR = 4  # GGML_LOG_LEVEL_ERROR
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
_BUFFER = re.compile(r"(model|KV|RS|compute|output) buffer size\s*=\s*([0-9.]+) MiB")
_PREFIX = re.compile(r"^\w+: ")


def libllama() -> ModuleType:
    """The binding. ggml is loaded first, so that libllama finds its libraries, and devices, loaded."""
    ggml()
    import llama_cpp.llama_cpp as llama

    return llama


class Log:
    """What libllama and ggml say while it is installed: their errors, and the buffers that they make.

    There is one log in a process; the last one that was made gets it.
    """

    def __init__(self) -> None:
        self.errors: deque[str] = deque(maxlen=16)
        self.buffers: Counter[str] = Counter()  # bytes by kind: model, KV, RS, compute, output
        llama = libllama()

        def write(level: int, text: bytes, data: Any) -> None:
            line = text.decode("utf-8", "replace").strip()
            if level == LOG_ERROR and line:
                self.errors.append(_PREFIX.sub("", line))
            elif (found := _BUFFER.search(line)) is not None:
                self.buffers[found[1]] += int(float(found[2]) * (1 << 20))

        self._callback = llama.llama_log_callback(write)  # must outlive every call of the library
        _installed.append(self._callback)
        llama.llama_log_set(self._callback, ctypes.c_void_p(0))

    def reason(self, otherwise: str) -> str:
        """The first error since the last call, which is the cause of the others."""
        found = next(iter(self.errors), otherwise)
        self.errors.clear()
        return found


@contextmanager
def opened_at(path: Path, offset: int) -> Iterator[int]:
    """A C library's FILE pointer to byte `offset` of a file. Raises OSError."""
    if sys.platform == "win32":  # where a name of bytes could not hold every letter
        libc = ctypes.CDLL("ucrtbase")
        start, seek, names = libc._wfopen, libc._fseeki64, (str(path), "rb")
        start.argtypes = (ctypes.c_wchar_p, ctypes.c_wchar_p)
    else:
        libc = ctypes.CDLL(None)
        start, seek, names = libc.fopen, libc.fseeko, (os.fsencode(path), b"rb")
        start.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    start.restype, libc.fclose.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    seek.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
    file = start(*names)
    if not file:
        raise FileNotFoundError(f"{path}: cannot be opened")
    try:
        if seek(file, offset, os.SEEK_SET):
            raise OSError(f"{path}: has no byte {offset}")
        yield file
    finally:
        libc.fclose(file)


@functools.cache
def knows(architecture: str) -> bool:
    """Whether this libllama has the family: asked with a file that has nothing but its name."""
    llama, log = libllama(), Log()
    llama.llama_backend_init()
    params = llama.llama_model_default_params()
    params.vocab_only = True
    with tempfile.TemporaryDirectory(prefix="hetero-") as folder:
        path = Path(folder) / "name.gguf"
        path.write_bytes(gguf_head({"general.architecture": architecture}, []))
        model = llama.llama_model_load_from_file(os.fsencode(path), params)
    if model:
        llama.llama_model_free(model)
    return not any("unknown model architecture" in error for error in log.errors)


_installed: list[Any] = []


__all__ = ["MAX_SEQUENCES", "Log", "knows", "libllama", "opened_at"]
