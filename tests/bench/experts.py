"""Milliseconds of one layer's mixture of experts: by our kernels, and by ggml's operators (mul_mat_id).

python tests/bench/experts.py                             a few formats, 8 experts of which 2 are used
python tests/bench/experts.py --types Q6_K --experts 64 --used 8 --ff 768

Random weights and inputs: each token chooses on its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from experts_tools import ExpertLayer
from tiny_models import tiny_model

from backends.cpu import layers
from backends.cpu.packed import packable
from backends.ggml.models.experts import expert_group

PATIENCE = 2.0  # seconds in which a cell is measured


def seconds(ours: ExpertLayer, theirs: ExpertLayer, count: int) -> list[float]:
    """Medians of both, taking turns, each time on other inputs: weights come from memory, not from caches."""
    rng, times = np.random.default_rng(0), ([], [])
    begin = time.perf_counter()
    while len(times[0]) < 4 or time.perf_counter() - begin < PATIENCE:
        x = rng.standard_normal((count, ours.config.n_embd)).astype(np.float32)
        for layer, found in zip((ours, theirs), times, strict=True):
            graph, source, _ = layer.graph(count)
            layer.lib.backend_tensor_set(source, x.ctypes.data, 0, x.nbytes)
            start = time.perf_counter()
            layer.compute(graph, count)
            found.append(time.perf_counter() - start)
    return [statistics.median(found[1:]) for found in times]  # the first one touches new memory


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", default="Q4_K,Q5_K,Q6_K,Q8_0,BF16")
    parser.add_argument("--tokens", default="1,8,64,512")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--used", type=int, default=2)
    parser.add_argument("--embd", type=int, default=2048)
    parser.add_argument("--ff", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    tokens = [int(n) for n in options.tokens.split(",")]
    print("ms of ours / ggml = **how many times as fast**\n")
    print("| type | " + " | ".join(f"N = {n}" for n in tokens) + " |")
    print("|---|" + "---|" * len(tokens))
    for name in options.types.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path = tiny_model(
                Path(folder) / "m.gguf",
                n_layers=1,
                n_embd=options.embd,
                n_ff=options.ff,
                n_heads=options.embd // 64,
                head_dim=64,
                n_experts=options.experts,
                n_experts_used=options.used,
                weight_type=name,
            )
            ours = ExpertLayer(path, options.threads)
            layers.packable = lambda gguf, n: not expert_group(n) and packable(gguf, n)
            theirs = ExpertLayer(path, options.threads)
            layers.packable = packable
            cells = []
            for count in tokens:
                own, other = seconds(ours, theirs, count)
                cells.append(f"{1e3 * own:.2f} / {1e3 * other:.2f} = **{other / own:.1f}**")
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
            ours.close()
            theirs.close()


if __name__ == "__main__":
    main()
