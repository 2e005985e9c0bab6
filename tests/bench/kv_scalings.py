"""Ways to scale keys and values for fp8 and q8_0: what each costs, in plain numpy on a real model's own.

    python tests/bench/kv_scalings.py --tokens 512

The model's weights are float32 here and nothing else is rounded, so that the format alone counts; kernels
are not involved. KL divergence from f16 and top-1 agreement are of the second half of the text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine import reference
from gguf.quants import dequantize
from places import smollm2

from backends.ggml.models import read_config
from hetero.text.tokenizer import Tokenizer
from hetero.windows import read_tokens
from quant.fp8 import LARGEST, decode_e4m3, decode_rows, encode_e4m3, encode_rows
from quant.gguf import GGUFFile, open_gguf
from quant.quality import Comparison, Summary

Rounded = reference.Rounded  # of float64 [T, heads, dim]
Rows = Callable[[np.ndarray], np.ndarray]  # the same of float32 [n, dim], each row by itself
SCALES_TRIED = 8  # of each row, from the least that saturates nothing to twice that


def by_rows(function: Rows) -> Rounded:
    def rounded(x: np.ndarray) -> np.ndarray:
        flat = np.ascontiguousarray(x.reshape(-1, x.shape[-1]), np.float32)
        return function(flat).reshape(x.shape).astype(np.float64)

    return rounded


def f16(rows: np.ndarray) -> np.ndarray:
    return rows.astype(np.float16).astype(np.float32)


def fp8(rows: np.ndarray) -> np.ndarray:
    """As it is built: of scales that make the largest value a code, the one of least error."""
    return decode_rows(*encode_rows(rows))


def scaled(rows: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """E4M3 with a scale for each row, float32 [n, 1]."""
    return decode_e4m3(encode_e4m3(rows / scales)) * scales


def least(rows: np.ndarray) -> np.ndarray:
    """The smallest scales that saturate nothing."""
    return np.maximum(np.abs(rows).max(axis=1, keepdims=True) / np.float32(LARGEST), np.float32(2**-24))


def largest(rows: np.ndarray) -> np.ndarray:
    return scaled(rows, f16(least(rows)))


def power_of_two(rows: np.ndarray) -> np.ndarray:
    return scaled(rows, np.exp2(np.ceil(np.log2(least(rows)))))


def nearest_of_some(rows: np.ndarray) -> np.ndarray:
    """The scale with the least squared error."""
    tried = [
        scaled(rows, least(rows) * np.float32(f)) for f in np.linspace(1, 2, SCALES_TRIED, endpoint=False)
    ]
    best = np.argmin([((t - rows) ** 2).sum(axis=1) for t in tried], axis=0)
    return np.stack(tried)[best, np.arange(len(rows))]


def rotated(function: Rows) -> Rows:
    """Multiplied by a Hadamard matrix first, which leaves the products with equally rotated queries alone."""

    def rounded(rows: np.ndarray) -> np.ndarray:
        matrix = np.ones((1, 1), np.float32)
        while len(matrix) < rows.shape[1]:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        matrix /= np.float32(len(matrix) ** 0.5)
        return function(rows @ matrix) @ matrix.T

    return rounded


def without_mean(function: Rows) -> Rounded:
    """Less the mean key of each head: every score changes by the same, which softmax does not see."""

    def rounded(x: np.ndarray) -> np.ndarray:
        mean = x.mean(axis=0, keepdims=True)
        return by_rows(function)(x - mean) + mean

    return rounded


def q8_0(rows: np.ndarray) -> np.ndarray:
    """ggml's: the largest magnitude of 32 values / 127."""
    blocks = rows.reshape(-1, 32)
    scales = f16(np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127))
    codes = np.rint(np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales > 0))
    return (codes * scales).reshape(rows.shape)


KEYS: dict[str, Rounded] = {
    "fp8, as it is built": by_rows(fp8),
    "fp8, the largest value / 448": by_rows(largest),
    "fp8, a power of two": by_rows(power_of_two),
    f"fp8, the nearest of {SCALES_TRIED} scales": by_rows(nearest_of_some),
    "fp8, rotated by a Hadamard matrix": by_rows(rotated(fp8)),
    "fp8, less the mean key": without_mean(fp8),
    "q8_0": by_rows(q8_0),
    "q8_0, rotated by a Hadamard matrix": by_rows(rotated(q8_0)),
}
VALUES: dict[str, Rounded] = {
    "fp8, as it is built": by_rows(fp8),
    "fp8, the largest value / 448": by_rows(largest),
    "fp8, rotated by a Hadamard matrix": by_rows(rotated(fp8)),
    "q8_0": by_rows(q8_0),
}


def scalings(path: Path, tokens: int) -> Iterator[tuple[str, str, Summary]]:
    """(keys or values, way, what it costs) of each, the other one being f16. Minutes."""
    gguf, tokenizer = open_gguf(path), Tokenizer(path)
    weights = {name: _float32(gguf, name) for name in gguf.tensors}
    ids = read_tokens(tokenizer, None, tokens)
    scored = np.arange(len(ids) // 2, len(ids) - 1)
    exact = by_rows(f16)

    def logits(keys: Rounded, values: Rounded) -> np.ndarray:
        return _forward(gguf, weights, ids, (keys, values))[scored]

    want = logits(exact, exact)
    for which, ways in (("keys", KEYS), ("values", VALUES)):
        for name, way in ways.items():
            comparison = Comparison()
            found = logits(way, exact) if which == "keys" else logits(exact, way)
            comparison.add(want, found, np.array(ids)[scored + 1])
            yield which, name, comparison.summary()


def _float32(gguf: GGUFFile, name: str) -> np.ndarray:
    info = gguf.tensors[name]
    return dequantize(gguf.tensor_data(name), info.type).astype(np.float32).reshape(info.shape[::-1])


def _forward(
    gguf: GGUFFile, weights: dict[str, np.ndarray], ids: list[int], kept: tuple[Rounded, Rounded]
) -> np.ndarray:
    return reference.forward(gguf, read_config(gguf), ids, kept=kept, weights=weights).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="GGUF file; the packaged SmolLM2 otherwise")
    parser.add_argument("--tokens", type=int, default=512, help="how much of the packaged text is read")
    args = parser.parse_args()
    for which, name, found in scalings(args.model or smollm2(), args.tokens):
        print(f"{which:7} {name:36} KL {found.kl_mean.value:.6f}  top-1 {100 * found.top1:.2f} %", flush=True)


if __name__ == "__main__":
    main()
