"""Reader of GGUF model files, in one file, split, or inside an executable (see gguf_head.py for the format).

The files are mapped, not read. A split model (docs of llama-gguf-split in ggml-org/llama.cpp) is files named
NAME-00001-of-00003.gguf and so on. Each is a GGUF with some of the tensors, with its place in `split.no`
(from 0) and `split.count`; the first has the metadata.

An executable that has a model inside (see one_file.py) is opened like the model.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from quant.gguf_arrays import ArrayValue, LazyArray
from quant.gguf_head import MAGIC, MAX_ALIGNMENT, GGUFError, Head, HeadParser, TensorInfo
from quant.one_file import read_contents
from quant.split import part_ending

__all__ = ["MAX_ALIGNMENT", "ArrayValue", "GGUFError", "GGUFFile", "LazyArray", "TensorInfo", "open_gguf"]

_MIXED = "the parts are not of one model: download them again"


class _Part:
    """One mapped file with its head. It begins at byte `start` of the file proper: 0 if no executable."""

    def __init__(self, path: Path, file: BinaryIO, start: int, mapped: mmap.mmap, head: Head):
        self.path, self.head, self.size = path, head, len(mapped)
        self.start = start
        self._file, self._mmap = file, mapped
        self._reading = threading.Lock()
        self.bytes: np.ndarray | None = np.frombuffer(mapped, np.uint8)

    @property
    def is_inside(self) -> bool:
        return self.start > 0

    def read_at(self, out: memoryview, at: int) -> int:
        """Read bytes from `at` on into `out`; how many."""
        at += self.start
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [out], at)
        with self._reading:
            self._file.seek(at)
            return self._file.readinto(out)  # type: ignore[attr-defined]

    def close(self) -> None:
        for value in self.head.metadata.values():
            if isinstance(value, LazyArray):
                value.release()
        self.bytes = None
        self._file.close()
        with suppress(BufferError):  # the last view unmaps it
            self._mmap.close()


class GGUFFile:
    """A validated, open GGUF model. `close()` or use as a context manager.

    `path` is the file, or the first of a split model. `metadata` maps keys to int, float, bool, str, list or
    (long arrays) a lazy sequence. `tensors` maps names to TensorInfo in file order. The mappings keep their
    addresses until `close()`; a view from `tensor_data` that is still alive then keeps its mapping alive.
    """

    def __init__(self, parts: list[_Part]):
        self._parts = parts
        self.path = parts[0].path
        self.version = parts[0].head.version
        metadata = parts[0].head.metadata
        if len(parts) > 1:  # about the files, not the model
            metadata = {key: value for key, value in metadata.items() if not key.startswith("split.")}
        self.metadata: Mapping[str, object] = metadata
        self.tensors: dict[str, TensorInfo] = {}
        for number, part in enumerate(parts):
            for name, info in part.head.tensors.items():
                self.tensors[name] = info._replace(part=number)

    @property
    def architecture(self) -> str:
        """The model family, as in `general.architecture`; "" in a file without one."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def paths(self) -> list[Path]:
        """All files of the model, in order."""
        return [part.path for part in self._parts]

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(part.size for part in self._parts)

    @property
    def is_inside(self) -> bool:
        """Whether the model is a part of another file, which no other program could read."""
        return any(part.is_inside for part in self._parts)

    @property
    def offset(self) -> int:
        """Where it begins in the file at `path`, in bytes."""
        return self._parts[0].start

    def metadata_bytes(self) -> bytes:
        """A GGUF of its own with the same metadata, byte for byte, and no tensors."""
        part = self._parts[0]
        if part.bytes is None:
            raise GGUFError(f"{self.path}: the file is closed")
        head = bytearray(part.bytes[: part.head.metadata_end])
        head[8:16] = bytes(8)  # the tensor count
        return bytes(head)

    @property
    def head_nbytes(self) -> int:
        """Bytes before the tensors' data, in all files together."""
        starts = [part.size for part in self._parts]
        for info in self.tensors.values():
            starts[info.part] = min(starts[info.part], info.offset)
        return sum(starts)

    def tensor_data(self, name: str) -> np.ndarray:
        """Read-only uint8 view [nbytes] of a tensor's bytes in the mapping. KeyError for no such tensor."""
        info = self.tensors[name]
        mapped = self._parts[info.part].bytes
        if mapped is None:
            raise GGUFError(f"{self.path}: the file is closed")
        return mapped[info.offset : info.offset + info.nbytes]

    def read_into(self, name: str, start: int, out: np.ndarray) -> None:
        """Fill `out` (uint8) with a tensor's bytes from `start` on.

        Unlike a look at `tensor_data` this leaves no pages of the file in the process. Callable from several
        threads at once. Raises GGUFError when the file has become shorter.
        """
        info, view = self.tensors[name], out.data
        part = self._parts[info.part]
        assert start + len(view) <= info.nbytes
        while view:
            count = part.read_at(view, info.offset + start)
            if not count:
                raise GGUFError(f"{part.path}: tensor {name!r} is cut off: the file has been changed")
            start, view = start + count, view[count:]

    def close(self) -> None:
        """Unmap the files, or leave that to the last view still alive."""
        for part in self._parts:
            part.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_gguf(path: str | os.PathLike) -> GGUFFile:
    """Map and validate the GGUF model at `path`: one file, or the first one of a split model.

    Raises GGUFError for anything that is not a complete, consistent GGUF in this machine's byte order.
    """
    first = _open_part(Path(path))
    parts = [first]
    try:
        for other in _other_paths(first):
            parts.append(_open_part(other, f"part {len(parts) + 1} of {first.head.parts}"))
        _check_parts(parts)
    except GGUFError:
        for part in parts:
            part.close()
        raise
    return GGUFFile(parts)


def _open_part(path: Path, what: str = "") -> _Part:
    """`what` names the part that the file should be, in the error when it cannot be read."""
    file = None
    try:
        file = path.open("rb", buffering=0)
        start, size = _span(file)
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ, offset=start)
    except (OSError, ValueError) as error:
        if file is not None:
            file.close()
        reason = getattr(error, "strerror", None) or str(error)
        if reason == "not a GGUF file":
            reason += "; other formats have to be converted, with llama.cpp's convert_hf_to_gguf.py"
        else:
            reason = f"cannot be read: {reason}"
        if what:
            reason += "; all parts must be in one folder, under the names that they came with"
        raise GGUFError(f"{path}: {what and what + ' '}{reason}") from None
    try:
        with memoryview(mapped) as view:
            head = HeadParser(path, view).parse()
        return _Part(path, file, start, mapped, head)
    except GGUFError as error:
        message = str(error)
    # Outside the handler: its traceback would still hold views of the mapping.
    mapped.close()
    file.close()
    raise GGUFError(message)


def _span(file: BinaryIO) -> tuple[int, int]:
    """Offset and size of the GGUF in an open file. Raises ValueError when there is none."""
    if file.read(4) == MAGIC:
        return 0, os.fstat(file.fileno()).st_size
    contents = read_contents(file)
    if contents is None or contents.model is None:
        raise ValueError("not a GGUF file")
    return contents.model.offset, contents.model.size


def _other_paths(first: _Part) -> list[Path]:
    """Where the other parts of a split model must be."""
    number, count = first.head.number + 1, first.head.parts
    if count == 1:
        return []
    name, ending = first.path.name, part_ending(number, count)
    if not name.endswith(ending) or name == ending:
        what = f"part {number} of a model split into {count} files"
        raise GGUFError(f"{first.path}: {what}; its name must end in {ending}: give it its own")
    paths = [
        first.path.with_name(name.removesuffix(ending) + part_ending(i, count)) for i in range(1, count + 1)
    ]
    if number > 1:
        raise GGUFError(f"{first.path}: part {number} of {count}; load the first part, {paths[0].name}")
    return paths[1:]


def _check_parts(parts: list[_Part]) -> None:
    """Raises GGUFError for parts that are not of one model."""
    first, owner = parts[0], dict[str, Path]()
    for number, part in enumerate(parts):
        found = part.head
        if (found.number, found.parts) != (number, first.head.parts):
            raise GGUFError(
                f"{part.path}: should be part {number + 1} of {first.head.parts}, and says that it is "
                f"part {found.number + 1} of {found.parts}; {_MIXED}"
            )
        for name in found.tensors:
            if name in owner:
                raise GGUFError(
                    f"{part.path}: tensor {name!r} occurs already in {owner[name].name}; {_MIXED}"
                )
            owner[name] = part.path
    announced = first.head.all_tensors
    if announced is not None and announced != len(owner):
        raise GGUFError(
            f"{first.path}: announces {announced} tensors in all parts, and there are {len(owner)}; {_MIXED}"
        )
