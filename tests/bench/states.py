"""Milliseconds of recurrent layers (gated delta nets): by our kernels, and by plain ggml operators.

python tests/bench/states.py                                   three layers as in Qwen 3.5 0.8B
python tests/bench/states.py --key-heads 16 --value-heads 32 --embd 2048

Three recurrent layers and one that attends, with a narrow feed-forward, random Q8_0 weights.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "engine"))

from driver import Driver
from tiny_hybrid import tiny_hybrid

from backends.ggml.layers import DeviceLayers
from backends.ggml.stage import GgmlStage

PATIENCE = 2.0  # seconds in which a cell is measured
STEPS = {"1 token": (1, 1), "8 sequences": (8, 1), "32 sequences": (32, 1), "a chunk of 256": (1, 256)}


class PlainStage(GgmlStage):
    def _kind(self) -> type[DeviceLayers]:
        return DeviceLayers


def seconds(drivers: list[Driver], sequences: int, rows: int) -> list[float]:
    """Medians of all, taking turns."""
    step = [([1 + 17 * i, 2 + 17 * i], 16 if rows == 1 else 0, [5] * rows) for i in range(sequences)]
    if rows > 1:
        step = [(list(range(1, 2 + rows // 16)), 0, [5] * rows)]
    times: list[list[float]] = [[] for _ in drivers]
    begin = time.perf_counter()
    while len(times[0]) < 4 or time.perf_counter() - begin < PATIENCE:
        for driver, found in zip(drivers, times, strict=True):
            start = time.perf_counter()
            driver.step(step)
            found.append(time.perf_counter() - start)
    return [statistics.median(found[1:]) for found in times]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--embd", type=int, default=1024)
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--value-heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_hybrid(
            Path(folder) / "m.gguf",
            n_embd=options.embd,
            n_ff=256,
            head_dim=64,
            n_rot=32,
            state_dim=options.dim,
            key_heads=options.key_heads,
            value_heads=options.value_heads,
            weight_type="Q8_0",
        )
        sizes = {"num_blocks": 560, "max_tokens": 256, "threads": options.threads}
        drivers = [Driver(path, kind=kind, **sizes) for kind in (GgmlStage, PlainStage)]
        print("| step | ours | ggml | times as fast |\n|---|---|---|---|")
        for name, (sequences, rows) in STEPS.items():
            ours, plain = seconds(drivers, sequences, rows)
            print(f"| {name} | {1e3 * ours:.2f} ms | {1e3 * plain:.2f} ms | {plain / ours:.1f} |")


if __name__ == "__main__":
    main()
