"""What the messages of hetero.pipeline.channel say about stages and steps.

OPEN      {"model": path or key, "device": DeviceSpec, "stage": StageSpec, "width": n_embd,
           "llama": LlamaSpec, if libllama computes all layers: in a child process only}
PROGRESS  {"bytes": loaded since the last one}
OPENED    {"memory": {purpose: bytes}}
STEP      {"step": id, "groups": G, "hidden": bool, "only_argmax": bool, "embeds": bool};
              arrays as in step_arrays
RESULT    {"step": id, "argmax": bool, "graph_seconds": s, "move_seconds": s, "moved_bytes": n,
           "counters": {name: count since the start}};
              arrays: rows f4 [n, width] (none if only_argmax and known), argmax i4 [n]
FAILED    {"text": one line}, to OPEN, STEP or CHECK
LOG       {"text": one line, "fatal": bool}, at any time
PING PONG     {}: the process lives, whatever it is doing
CHECK CHECKED {}: the device lives, as StageBackend.check has it
CLOSE         {}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeGuard, TypeVar

import numpy as np

from backends.base import BatchLike, DeviceSpec, ModelSizes
from backends.ggml.stage import StageSpec
from backends.kv_format import KV_TYPES
from backends.llama.spec import LlamaSpec
from hetero.batch import BlockCopy, BlockMove
from hetero.pipeline.channel import ALIGNMENT, Message, WireError
from hetero.plan.planner import BLOCK_SIZE

T = TypeVar("T")
_PER_STEP = 10  # arrays beside those of the groups and hidden rows
MAX_GROUPS = 16
MAX_SECONDS = 1e6  # no step takes as long


@dataclass(slots=True)
class WireBatch:
    """A hetero.batch.Batch that came over a channel."""

    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: list[np.ndarray]
    block_tables: list[np.ndarray]
    context_lens: np.ndarray
    cu_seqlens_q: np.ndarray
    logits_rows: np.ndarray
    copies: list[BlockCopy]
    only_argmax: bool
    embeds: bool = False
    spills: Sequence[BlockMove] = ()
    loads: Sequence[BlockMove] = ()
    state_sources: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    state_writes: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int32))


def open_header(
    model: str, device: DeviceSpec, stage: StageSpec, width: int, llama: LlamaSpec | None = None
) -> dict[str, Any]:
    """The header of OPEN. `width` is n_embd, the columns of hidden rows. With `llama` libllama computes."""
    plain = asdict(stage)
    plain["group_of"] = sorted(stage.group_of.items())
    header = {"model": model, "device": asdict(device), "stage": plain, "width": width}
    return header if llama is None else header | {"llama": asdict(llama)}


def read_device(header: dict[str, Any]) -> DeviceSpec:
    """The DeviceSpec of an OPEN header. Raises WireError."""
    return _dataclass(DeviceSpec, header.get("device"))


def read_stage(header: dict[str, Any]) -> StageSpec:
    """The StageSpec of an OPEN header. Raises WireError."""
    parts = header.get("stage")
    if isinstance(parts, dict):
        try:
            parts = {**parts, "group_of": {int(layer): int(g) for layer, g in parts["group_of"]}}
        except (KeyError, TypeError, ValueError):
            raise WireError("group_of is not [[layer, group], ...]") from None
    spec = _dataclass(StageSpec, parts)
    sizes = (
        spec.first,
        spec.last,
        spec.max_tokens,
        spec.max_logits,
        spec.depth,
        spec.max_context,
        spec.num_states,
        *spec.num_blocks,
        *spec.host_slots,
        spec.host_experts,
        spec.host_threads,
    )
    if not all(type(n) is int and 0 <= n < 1 << 31 for n in sizes) or len(spec.num_blocks) > MAX_GROUPS:
        raise WireError("the stage's sizes are no sizes")
    if spec.key_type not in KV_TYPES or spec.value_type not in KV_TYPES:
        raise WireError("a KV cache of an unknown format")
    if len(spec.host_slots) not in (0, len(spec.num_blocks)):
        raise WireError("host slots for other groups than there are")
    return spec


def _dataclass(kind: type[T], parts: Any) -> T:
    """A plain dataclass from JSON: exactly its fields, lists as tuples."""
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(parts, dict) or set(parts) - known:
        raise WireError(f"no {kind.__name__}")
    try:
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in parts.items()})
    except TypeError:
        raise WireError(f"a {kind.__name__} with missing fields") from None


def step_arrays(batch: BatchLike, hidden: np.ndarray | None) -> list[np.ndarray]:
    """The arrays of STEP, G groups:

    input_ids, positions, context_lens, cu_seqlens_q, logits_rows   int32, as in hetero.batch.Batch
    copies                                  int32 [n, 3]: group, source block, target block
    spills, loads                           int32 [n, 3]: group, block, host slot
    state_sources, state_writes             int32, as in hetero.batch.Batch
    slot_mapping x G, block_tables x G      int32
    hidden                                  float32 [T, n_embd], unless the stage is the first
    """
    copies = [(c.group, c.src, c.dst) for c in batch.copies]
    moves = [[(m.group, m.block, m.slot) for m in moves] for moves in (batch.spills, batch.loads)]
    triples = [np.array(rows, np.int32).reshape(-1, 3) for rows in (copies, *moves)]
    states = (batch.state_sources, batch.state_writes)
    arrays = [batch.input_ids, batch.positions, batch.context_lens, batch.cu_seqlens_q, batch.logits_rows]
    arrays = [
        np.asarray(a, np.int32)
        for a in (*arrays, *triples, *states, *batch.slot_mapping, *batch.block_tables)
    ]
    return arrays if hidden is None else [*arrays, hidden]


def read_step(message: Message, spec: StageSpec, width: int) -> tuple[WireBatch, np.ndarray | None]:
    """The batch and the hidden rows of a STEP, with every index inside the stage's pools and host memory.

    Kernels trust these numbers. Raises WireError where they cannot be right. A step of moves alone has no
    tokens.
    """
    groups, with_hidden = message.header.get("groups"), message.header.get("hidden")
    arrays = message.arrays
    expected = len(spec.num_blocks)
    if bool(with_hidden) != (spec.first > 0):
        raise WireError("hidden rows where there are none, or none where there must be")
    if groups != expected or len(arrays) != _PER_STEP + 2 * expected + bool(with_hidden):
        raise WireError("a step with the wrong number of arrays")
    ints = arrays[: _PER_STEP + 2 * expected]
    if any(a.dtype != np.int32 for a in ints):
        raise WireError("a step's indices are not int32")
    ids, positions, context, cu, rows, copies, spills, loads, sources, writes, *rest = ints
    slots, tables = rest[:expected], rest[expected:]
    size, count = len(context) if context.ndim == 1 else -1, len(ids) if ids.ndim == 1 else -1
    shapes = [(positions, (count,)), (cu, (size + 1,)), (rows, (len(rows),)), *((s, (count,)) for s in slots)]
    good = 0 <= size <= count <= spec.max_tokens and all(a.shape == shape for a, shape in shapes)
    good = good and all(m.shape == (len(m), 3) for m in (copies, spills, loads))
    good = good and all(t.ndim == 2 and len(t) == size and (t.shape[1] or not size) for t in tables)
    if not (good and len(rows) <= spec.max_logits and _indices_fit(cu, rows, count)):
        raise WireError("a step's arrays do not fit together")
    blocks, host_slots = spec.num_blocks, spec.host_slots or (0,) * expected
    for slot, table, n in zip(slots, tables, blocks, strict=True):
        if not (_within(slot, n * BLOCK_SIZE) and _within(table, n)):
            raise WireError("a step reaches outside of the KV pools")
    reach = min(t.shape[1] for t in tables) * BLOCK_SIZE if tables else 0
    if not (_within(positions, reach) and _within(context - 1, reach)):
        raise WireError("a step's positions lie outside of its block tables")
    if not _states_fit(sources, writes, np.diff(cu), spec.num_states):
        raise WireError("a step's states are not where states can be")
    copied = [BlockCopy(*row) for row in _checked(copies, blocks, blocks, "a copy outside of the KV pools")]
    what = "a move outside of the KV pools or of host memory"
    out, back = ([BlockMove(*row) for row in _checked(m, blocks, host_slots, what)] for m in (spills, loads))
    hidden = arrays[-1] if with_hidden else None
    if hidden is not None and (hidden.dtype != np.float32 or hidden.shape != (count, width)):
        raise WireError("hidden rows of the wrong shape")
    greedy, embeds = (message.header.get(name) is True for name in ("only_argmax", "embeds"))
    batch = WireBatch(
        ids, positions, slots, tables, context, cu, rows, copied, greedy, embeds, out, back, sources, writes
    )
    return batch, hidden


def result_of(
    message: Message, rows: int, width: int, only_argmax: bool
) -> tuple[np.ndarray, np.ndarray | None, float]:
    """(rows float32 [rows, width], argmax int32 [rows] or None, graph seconds) of a RESULT.

    No rows where `only_argmax` was asked for and has come.
    """
    arrays, seconds = message.arrays, message.header.get("graph_seconds")
    with_argmax = message.header.get("argmax") is True
    wanted = 0 if only_argmax and with_argmax else rows
    good = len(arrays) == 1 + with_argmax and arrays[0].shape == (wanted, width)
    good = good and arrays[0].dtype == np.float32 and _is_time(seconds)
    if not good or (with_argmax and (arrays[1].shape != (rows,) or arrays[1].dtype != np.int32)):
        raise WireError("a result of the wrong shape")
    return arrays[0], arrays[1] if with_argmax else None, float(seconds or 0.0)


def moves_of(message: Message) -> tuple[float, int]:
    """(seconds, bytes) of a RESULT's moves. Raises WireError."""
    seconds, nbytes = message.header.get("move_seconds"), message.header.get("moved_bytes")
    if not (_is_time(seconds) and type(nbytes) is int and 0 <= nbytes < 1 << 62):
        raise WireError("a result without what its moves took")
    return float(seconds), nbytes


def _is_time(seconds: object) -> TypeGuard[float]:
    """Whether they can be added to others: JSON may hold infinities and integers beyond any float."""
    return isinstance(seconds, float | int) and 0 <= seconds < MAX_SECONDS


def counts_of(message: Message, name: str) -> dict[str, int]:
    """A field of the header that maps names to counts, such as "memory". Raises WireError."""
    counts = message.header.get(name)
    if not isinstance(counts, dict) or not all(type(n) is int for n in counts.values()):
        raise WireError(f"{name} is no table of counts")
    return counts


def largest_step(spec: StageSpec, width: int) -> int:
    """Bytes that the payload of any STEP of at most `max_logits` sequences fits in."""
    groups, tokens, sequences = len(spec.num_blocks), spec.max_tokens, spec.max_logits
    tables = 4 * groups * sequences * max(spec.num_blocks, default=0)
    # each copy and each load has a block of its own to write to; what is spilled is a block that was filled
    copies = 12 * sum(spec.num_blocks) * (3 if any(spec.host_slots) else 1)
    vectors = 4 * tokens * (2 + groups) + 4 * (4 * sequences + 1) + 12 * spec.num_states
    hidden = 0 if spec.first == 0 else 4 * tokens * width
    return tables + copies + vectors + hidden + ALIGNMENT * (_PER_STEP + 2 * groups + 1)


def largest_result(spec: StageSpec, config: ModelSizes) -> int:
    """Bytes that the payload of any RESULT fits in: a row for each token, or logits."""
    sizes = [4 * spec.max_tokens * config.n_embd]
    if spec.last == config.n_layer:
        sizes.append(4 * spec.max_logits * (config.n_vocab + 1))
    return max(sizes) + 2 * ALIGNMENT


def one_line(error: object) -> str:
    """An error's text for a user or a log: one line, bounded."""
    return " ".join(str(error).split())[:500] or type(error).__name__


def _states_fit(sources: np.ndarray, writes: np.ndarray, counts: np.ndarray, num_states: int) -> bool:
    """Whether all slots are there, and each row is one of its sequence's: in the order of both.

    A step of a model with states may also use none.
    """
    size = len(sources)
    if size not in ((0, len(counts)) if num_states else (0,)) or not _within(sources, num_states):
        return False
    if sources.ndim != 1 or writes.shape != (len(writes), 3):
        return False
    sequences, rows, slots = writes.T
    if not (_within(sequences, size) and _within(slots - 1, num_states - 1)):
        return False
    ascending = np.diff(sequences.astype(np.int64) << 32 | rows) > 0
    return bool(((rows > 0) & (rows <= counts[sequences])).all() and ascending.all())


def _within(values: np.ndarray, end: int) -> bool:
    return not values.size or bool(values.min() >= 0 and values.max() < end)


def _checked(
    rows: np.ndarray, first: Sequence[int], second: Sequence[int], what: str
) -> list[tuple[int, int, int]]:
    """Rows of (group, index below `first[group]`, index below `second[group]`), no more than make sense.

    Raises WireError, which says `what` they are otherwise.
    """
    triples: list[tuple[int, int, int]] = rows.tolist()
    groups = len(first)
    if len(triples) > sum(first) or not all(
        0 <= g < groups and 0 <= a < first[g] and 0 <= b < second[g] for g, a, b in triples
    ):
        raise WireError(what)
    return triples


def _indices_fit(cu: np.ndarray, rows: np.ndarray, count: int) -> bool:
    return bool(cu[0] == 0 and cu[-1] == count and (np.diff(cu) > 0).all()) and _within(rows, count)
