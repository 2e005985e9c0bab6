"""Quantizing a GGUF file with libllama: first the plan, by its own dry run, then the file.

The work happens in a child process (hetero.quantizer_child); this side reads the log it sends. What a tensor
becomes is therefore libllama's answer, not a copy of its rules.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hetero import quantizer_child
from hetero.processes import without_interrupts
from hetero.quantizer_child import ALIGNMENT, Job
from hetero.sizes import format_size
from quant.gguf import GGUFError, GGUFFile, open_gguf
from quant.types import GGML_TYPES, TYPE_IDS, row_bytes

__all__ = ["Fallback", "Job", "Plan", "QuantizeError", "Quantizer", "TensorPlan", "write_atomically"]

# The log of libllama (llama-quant.cpp), a line for each tensor and one for each that does not fit its type.
_TENSOR = re.compile(r"\[ *\d+/ *\d+\] (?P<name>.*?) +- \[[ \d,]*\], type = +(?P<type>\w+), ")
_TARGET = re.compile(r" MiB -> +[\d.]+ MiB \((?P<type>\w+)\)$")
_FALLBACK = re.compile(
    r"warning: (?P<name>.*?) +- ncols +(?P<ncols>\d+) not divisible by .*"
    r"\(required for type +(?P<asked>\w+)\).*-> falling back to +(?P<used>\w+)$"
)
_FAILED = re.compile(r"failed to quantize: (?P<why>.*)$")
_NO_IMATRIX = re.compile(r"did not find weights for (?P<name>.*)$")
_UNQUANTIZED = {TYPE_IDS[name] for name in ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")}


class QuantizeError(ValueError):
    """The file cannot be quantized so: one line that says why."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """A tensor whose rows of `row_length` weights are no whole number of blocks of the type asked for."""

    name: str
    row_length: int
    asked: str
    used: str


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor before and after: type names as in quant.types, sizes in bytes, `shape` row length first."""

    name: str
    shape: tuple[int, ...]
    source: str
    target: str
    bytes_before: int
    bytes_after: int
    weights: int

    @property
    def requantized(self) -> bool:
        """Whether a quantized tensor is decoded and quantized again."""
        return self.source != self.target and TYPE_IDS[self.source] not in _UNQUANTIZED


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of every tensor, in the order of the file."""

    tensors: tuple[TensorPlan, ...]
    fallbacks: tuple[Fallback, ...]
    needs_imatrix: bool

    @property
    def weights(self) -> int:
        return sum(t.weights for t in self.tensors)

    @property
    def bytes_before(self) -> int:
        return sum(t.bytes_before for t in self.tensors)

    @property
    def bytes_after(self) -> int:
        return sum(t.bytes_after for t in self.tensors)

    @property
    def requantized(self) -> dict[str, int]:
        """How many tensors of each quantized type would be quantized again."""
        counts: dict[str, int] = {}
        for t in self.tensors:
            if t.requantized:
                counts[t.source] = counts.get(t.source, 0) + 1
        return counts


@dataclass(slots=True)
class _Log:
    """Takes in the log as it comes, in pieces of lines; calls `on_tensor(name)` when one is begun."""

    on_tensor: Callable[[str], None]
    targets: dict[str, str] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)
    without_imatrix: list[str] = field(default_factory=list)
    failure: str = ""
    needs_imatrix: bool = False
    _line: str = ""

    def feed(self, text: str) -> None:
        known = _TENSOR.match(self._line)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._take(line)
        begun = _TENSOR.match(self._line)
        if begun and not known:
            self.on_tensor(begun["name"])

    def _take(self, line: str) -> None:
        if found := _FAILED.search(line):  # may follow a tensor's unfinished line
            begun = _TENSOR.match(line)
            self.failure = (f"tensor {begun['name']}: " if begun else "") + found["why"].strip()
        elif tensor := _TENSOR.match(line):
            target = _TARGET.search(line)
            self.targets[tensor["name"]] = (target or tensor)["type"].upper()
        elif found := _FALLBACK.match(line):
            used, asked = found["used"].upper(), found["asked"].upper()
            self.fallbacks.append(Fallback(found["name"], int(found["ncols"]), asked, used))
        elif found := _NO_IMATRIX.search(line):
            self.without_imatrix.append(found["name"])
        elif "will require an imatrix" in line:
            self.needs_imatrix = True


class Quantizer:
    """A child process that quantizes one file. Close it; leaving a `with` does.

    `source` is the open file that `job` names: looked through before libllama sees it, which aborts on some
    malformed ones.
    """

    def __init__(self, source: GGUFFile, job: Job):
        self.source = source
        self.without_imatrix: list[str] = []
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._child = context.Process(target=quantizer_child.serve, args=(theirs, job), daemon=True)
        with without_interrupts():
            self._child.start()
        theirs.close()

    def __enter__(self) -> Quantizer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child, whatever it is doing."""
        self._connection.close()
        if self._child.is_alive():
            self._child.kill()
        self._child.join()

    def plan(self) -> Plan:
        """What libllama would make of each tensor. Raises QuantizeError."""
        log = self._run(None, lambda name: None)
        missing = [name for name in self.source.tensors if name not in log.targets]
        if missing:
            raise QuantizeError(f"{self.source.path}: libllama says nothing about tensor {missing[0]!r}")
        tensors = []
        for info in self.source.tensors.values():
            target, rows = log.targets[info.name], 1
            for dim in info.shape[1:]:
                rows *= dim
            after = rows * row_bytes(TYPE_IDS[target], info.shape[0])
            source = GGML_TYPES[info.type].name
            weights = rows * info.shape[0]
            tensors.append(TensorPlan(info.name, info.shape, source, target, info.nbytes, after, weights))
        return Plan(tuple(tensors), tuple(log.fallbacks), log.needs_imatrix)

    def write(self, path: Path, plan: Plan, progress: Callable[[float], None]) -> None:
        """Write the quantized file to `path`, and check that it holds what the plan says.

        `progress` gets the part of the bytes that is done, 0 to 1. Raises QuantizeError; what has been
        written is then left to the caller to remove.
        """
        sizes = {t.name: t.bytes_before for t in plan.tensors}
        done = 0

        def begun(name: str) -> None:
            nonlocal done
            progress(done / max(1, plan.bytes_before))
            done += sizes.get(name, 0)

        try:
            self.without_imatrix = self._run(path, begun).without_imatrix
        except BaseException:
            self.close()  # first: it might still be about to create the file that the caller removes
            raise
        progress(1.0)
        _check_output(path, plan)

    def _run(self, output: Path | None, on_tensor: Callable[[str], None]) -> _Log:
        log, aborted = _Log(on_tensor), ""
        try:
            self._connection.send(output)
            while True:
                kind, value = self._connection.recv()
                if kind == "log":
                    log.feed(value)
                elif kind == "abort":
                    aborted = value
                else:
                    break
        except (EOFError, OSError):
            self._child.join()
            why = aborted or log.failure or f"exit code {self._child.exitcode}"
            raise QuantizeError(f"{self.source.path}: libllama's quantizer ended abnormally: {why}") from None
        if value != 0:
            raise QuantizeError(f"{self.source.path}: {log.failure or 'libllama cannot quantize it'}")
        return log


def _check_output(path: Path, plan: Plan) -> None:
    """The file opens and holds every tensor with its shape and its planned type."""
    wanted = {t.name: (t.shape, TYPE_IDS[t.target]) for t in plan.tensors}
    try:
        file = open_gguf(path)
    except GGUFError as exc:
        raise QuantizeError(f"libllama wrote a damaged file: {exc}") from None
    found = {t.name: (t.shape, t.type) for t in file.tensors.values()}
    file.close()
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        raise QuantizeError(f"libllama wrote something else than planned, first at tensor {wrong[0]!r}")


def size_of_output(source: GGUFFile, plan: Plan) -> int:
    """Bytes that the file will take at most: its head, which keeps its length, and padded tensors."""
    head = source.head_nbytes + 4096  # two keys may be added
    return head + sum(-(-t.bytes_after // ALIGNMENT) * ALIGNMENT for t in plan.tensors)


def write_atomically(target: Path, need: int, force: bool, write: Callable[[Path], None]) -> None:
    """Have `write(path)` make a file beside `target`, and rename it there when it is safely on the disk.

    Whatever is raised, also KeyboardInterrupt, no part of a file is left. Raises QuantizeError when fewer
    than `need` bytes are free, or when `target` has come into being meanwhile and not `force`.
    """
    free = shutil.disk_usage(target.parent).free
    if free < need:
        raise QuantizeError(
            f"{target}: {format_size(need)} are needed in {target.parent}, {format_size(free)} are free"
        )
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        write(part)
        with part.open("r+b") as file:
            os.fsync(file.fileno())
        if target.exists() and not force:
            raise QuantizeError(f"{target}: exists by now; --force replaces it")
        part.replace(target)
    except OSError as exc:
        raise QuantizeError(f"{target}: {exc.strerror or exc}") from None
    finally:
        part.unlink(missing_ok=True)
    if os.name == "posix":  # the rename itself is only safe once the folder is
        with contextlib.suppress(OSError):
            folder = os.open(target.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
