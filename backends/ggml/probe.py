"""Which of ggml's CPU matmuls can be trusted, found out in a child process.

Two things are asked of a weight type in a buffer type before it is used:

- Does it survive? A CPU may advertise instructions (AMX) that its hypervisor kills the process for,
  and ggml's extra buffer types (AMX, CPU_REPACK) use them at the first multiplication.
- From how many rows on do a row's bits no longer depend on the rows beside it? ggml picks another
  kernel for few rows (llamafile's from 2 or 8 on), with another order of summation; graphs are padded
  to that many rows, so that a greedy answer never depends on what else is in the batch.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import platformdirs
from llvmlite import binding

from backends.ggml.devices import Device, open_device
from backends.ggml.lib import TYPE_F32, DeviceError, ggml, set_buffer
from quant.types import row_bytes

ROWS_TRIED = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 31, 33, 64)
COLUMNS, OUTPUTS = 512, 64
PLAIN = ""  # stands for the device's ordinary buffer type
TIMEOUT = 120.0  # of a trial; IQ1_M takes 5 s on an idle machine to make the weights for it
TILES = "GGML_CPU_TILED_MM"  # of ggml: 0 turns off the kernel for many rows

# (weight type, buffer type name) -> rows from which a row's bits are its own; absent: do not use
Verdicts = dict[tuple[int, str], int]


def probe(types: Iterable[int]) -> Verdicts:
    """Verdicts for weight types on the CPU device, from the cache or from a child process."""
    wanted = sorted(set(types))
    path = _cache_path()
    known = _read(path)
    missing = [t for t in wanted if str(t) not in known]
    if missing:
        known |= {str(t): found for t, found in _ask_child(missing).items()}
        _write(path, known)
    return {(t, name): rows for t in wanted for name, rows in known[str(t)].items()}


def _cache_path() -> Path:
    base = os.environ.get("HETERO_CACHE_DIR") or platformdirs.user_cache_dir("hetero")
    library = ggml()
    build = hashlib.sha256(f"{library.folder} {library.version()}".encode()).hexdigest()[:12]
    return Path(base).expanduser() / "probe" / f"{binding.get_host_cpu_name()}-{build}.json"


def _read(path: Path) -> dict[str, dict[str, int]]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _write(path: Path, known: dict[str, dict[str, int]]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_text(json.dumps(known))
        beside.replace(path)
    except OSError:  # a read-only cache: ask again next time
        return


def _ask_child(types: list[int]) -> dict[int, dict[str, int]]:
    """Run the trials in children, a new one after each that died, without what killed it."""
    found: dict[int, dict[str, int]] = {t: {} for t in types}
    todo: list[tuple[int, str]] | None = None
    context = multiprocessing.get_context("spawn")
    while todo is None or todo:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(sender, types, todo), daemon=True)
        child.start()
        sender.close()
        todo, current = _collect(receiver, found, todo)
        if todo is None:
            raise DeviceError("cannot try ggml's matrix products: their process did not start")
        child.join(1.0)
        if child.is_alive():
            child.kill()
        if current is not None and todo:
            todo = [pair for pair in todo if pair != current]
        elif current is None:
            break
    return found


def _collect(receiver, found: dict[int, dict[str, int]], todo):
    """Take in a child's messages. Returns (what is left, None if it never began; the trial it died in or
    None)."""
    current = None
    try:
        while receiver.poll(TIMEOUT):
            kind, *rest = receiver.recv()
            if kind == "todo":
                todo = rest[0]
            elif kind == "start":
                current = rest[0]
            elif kind == "rows":
                pair, rows = rest
                if rows:
                    found[pair[0]][pair[1]] = rows
                todo, current = [p for p in todo if p != pair], None
            else:
                return [], None
    except EOFError:
        pass
    return todo, current


def _child(sender, types: list[int], todo: list[tuple[int, str]] | None) -> None:
    device = open_device("CPU", 2)
    lib = ggml()
    buffers = {PLAIN: device.buffer_type}
    buffers |= {lib.backend_buft_name(b).decode(): b for b in device.extra_buffer_types()}
    if todo is None:
        todo = [(t, name) for t in types for name in buffers]
        sender.send(("todo", todo))
    for pair in todo:
        sender.send(("start", pair))
        sender.send(("rows", pair, _rows_needed(device, pair[0], buffers[pair[1]])))
    sender.send(("done",))


def _rows_needed(device: Device, type_id: int, buffer_type: int) -> int:
    """The smallest count tried from which all counts give a row the same bits; 0 if not supported."""
    lib, rng = ggml(), np.random.default_rng(0)
    weights = _quantize(type_id, rng.standard_normal((OUTPUTS, COLUMNS)).astype(np.float32))
    context = lib.context(1)
    weight = lib.new_tensor_4d(context, type_id, COLUMNS, OUTPUTS, 1, 1)
    if buffer_type != device.buffer_type and not _supported(device, weight, buffer_type):
        lib.free(context)
        return 0
    buffer = lib.backend_alloc_ctx_tensors_from_buft(context, buffer_type)
    lib.backend_tensor_set(weight, weights.ctypes.data, 0, weights.nbytes)
    rows = rng.standard_normal((max(ROWS_TRIED), COLUMNS)).astype(np.float32)
    results = {n: _multiply(device, weight, rows[len(rows) - n :]) for n in ROWS_TRIED}
    lib.backend_buffer_free(buffer)
    lib.free(context)
    whole = results[len(rows)]
    needed = 0
    for n in sorted(ROWS_TRIED, reverse=True):
        if not np.array_equal(results[n], whole[len(rows) - n :]):
            break
        needed = n
    return needed


def turn_off_tiles(device: Device, type_id: int) -> None:
    """Keep ggml, in this process, from the kernel that it otherwise takes for 8 rows or more of some types.

    It reads the variable at its first product and never again, so this has no effect after one. Children that
    probe do not see it: their verdicts hold for other processes too.
    """
    before = os.environ.get(TILES)
    os.environ[TILES] = "0"
    try:
        _rows_needed(device, type_id, device.buffer_type)
    finally:
        del os.environ[TILES]
        if before is not None:
            os.environ[TILES] = before


def _quantize(type_id: int, values: np.ndarray) -> np.ndarray:
    if type_id == TYPE_F32:
        return values
    out = np.empty(len(values) * row_bytes(type_id, values.shape[1]), np.uint8)
    importance = np.ones(values.shape[1], np.float32)
    ggml().quantize_chunk(
        type_id, values.ctypes.data, out.ctypes.data, 0, *values.shape, importance.ctypes.data
    )
    return out


def _supported(device: Device, weight: int, buffer_type: int) -> bool:
    """Whether the device multiplies by `weight` were it in such a buffer."""
    lib = ggml()
    empty = lib.backend_buft_alloc_buffer(buffer_type, 0)
    context = lib.context(2)
    set_buffer(weight, empty)
    product = lib.mul_mat(context, weight, lib.new_tensor_4d(context, TYPE_F32, COLUMNS, 1, 1, 1))
    answer = bool(lib.backend_dev_supports_op(device.handle, product))
    set_buffer(weight, None)
    lib.free(context)
    lib.backend_buffer_free(empty)
    return answer


def _multiply(device: Device, weight: int, rows: np.ndarray) -> np.ndarray:
    lib = ggml()
    context = lib.context(4, 4)
    x = lib.new_tensor_4d(context, TYPE_F32, COLUMNS, len(rows), 1, 1)
    lib.set_input(x)
    y = lib.mul_mat(context, weight, x)
    lib.set_output(y)
    graph = lib.new_graph_custom(context, 4, False)
    lib.build_forward_expand(graph, y)
    allocator = lib.gallocr_new(device.buffer_type)
    lib.gallocr_alloc_graph(allocator, graph)
    data = np.ascontiguousarray(rows)
    lib.backend_tensor_set(x, data.ctypes.data, 0, data.nbytes)
    lib.backend_graph_compute(device.backend, graph)
    out = np.empty((len(rows), OUTPUTS), np.float32)
    lib.backend_tensor_get(y, out.ctypes.data, 0, out.nbytes)
    lib.gallocr_free(allocator)
    lib.free(context)
    return out


__all__ = ["PLAIN", "Verdicts", "probe", "turn_off_tiles"]
