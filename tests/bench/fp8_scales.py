"""What scales of fp8 rows cost: errors of attention over a model's real keys and values, once coded.

python tests/bench/fp8_scales.py MODEL [TOKENS]        768 tokens of README.md take a minute

Queries of the last 96 tokens attend to coded keys and to coded values, each alone, in every layer and head.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from attention_tools import decoded, encoded, take_apart  # noqa: E402
from engine.driver import Driver  # noqa: E402

from backends.cpu import rope_store  # noqa: E402
from backends.cpu.graph import CpuGraphBuilder  # noqa: E402
from backends.ggml.graph import GraphBuilder  # noqa: E402
from backends.ggml.lib import shape_of  # noqa: E402
from backends.ggml.stage import GgmlStage  # noqa: E402
from hetero.text.tokenizer import Tokenizer  # noqa: E402
from quant.fp8 import LARGEST, PEAKS, SMALLEST_SCALE, decode_e4m3, encode_e4m3  # noqa: E402

QUERIES = 96
Scheme = Callable[[np.ndarray], np.ndarray]  # rows [n, dim] to what is left of them


class QueryBuilder(CpuGraphBuilder):
    """Keeps what enters attention to the end of the step."""

    def custom(self, width: int, rows: int, sources: Any, address: int, parameters: np.ndarray) -> int:
        tensor = super().custom(width, rows, sources, address, parameters)
        if address == rope_store.rope_store_operator.address:
            self.lib.set_output(tensor)
            self.__dict__.setdefault("queries", []).append(tensor)
        return tensor


class QueryStage(GgmlStage):
    """A CPU stage whose steps also leave `queries`: float32 [layers, T, heads, dim], rotated and scaled."""

    def compute(self) -> np.ndarray:
        assert self._prepared is not None
        builder: Any = self._prepared[0].builder
        result = super().compute().copy()
        parts = []
        for tensor in builder.queries:
            values = np.empty(shape_of(tensor)[1::-1], np.float32)
            self._get(tensor, values)
            parts.append(values.reshape(len(values), -1, self.config.head_dim_k))
        self.queries = np.stack(parts)
        return result

    def _new_builder(self, rows: int, layout: Any) -> GraphBuilder:
        return self._layers.new_builder(rows, layout, QueryBuilder)


def attended(path: Path, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """Queries, keys and values float32 [layers, T, heads, dim] of a text, and the windows (0: none)."""
    ids = Tokenizer(path).encode((ROOT / "README.md").read_text(), parse_special=False, add_special=True)[
        :count
    ]
    blocks = -(-len(ids) // 16)
    driver = Driver(path, num_blocks=blocks + 1, max_tokens=len(ids), kind=QueryStage)
    driver.step([(np.arange(1, blocks + 1), 0, ids)])
    c, pools = driver.config, driver.stage._layers.kv
    found = []
    for addresses, dim, keys in ((pools._keys, c.head_dim_k, True), (pools._values, c.head_dim_v, False)):
        layers = [_rows(addresses[layer], blocks, c.n_head_kv, dim, keys) for layer in sorted(addresses)]
        found.append(np.stack(layers)[:, : len(ids)])
    return driver.stage.queries[:, : len(ids)], *found, [w or 0 for w in c.layer_windows]


def _rows(address: int, blocks: int, heads: int, dim: int, keys: bool) -> np.ndarray:
    """float32 [16 * blocks, heads, dim] of an f16 pool's blocks from 1 on."""
    size = 32 * dim
    pool = np.ctypeslib.as_array((ctypes.c_uint8 * ((blocks + 1) * heads * size)).from_address(address))
    parts = [take_apart("f16", part, dim, keys)[0] for part in pool.reshape(-1, size)[heads:]]
    return (
        np.stack(parts)
        .reshape(blocks, heads, 16, dim)
        .swapaxes(1, 2)
        .reshape(-1, heads, dim)
        .astype(np.float32)
    )


def through(kv_type: str) -> Scheme:
    return lambda rows: decoded(kv_type, *encoded(kv_type, np.ascontiguousarray(rows)))


def best_of(peaks: tuple[float, ...]) -> Scheme:
    """The scale of least squared error of those that turn the largest value into a peak."""

    def code(rows: np.ndarray) -> np.ndarray:
        tries = []
        for peak in peaks:
            scale = np.maximum((np.abs(rows).max(axis=1) / peak).astype(np.float16), SMALLEST_SCALE)[:, None]
            tries.append(decode_e4m3(encode_e4m3(rows / scale)) * scale)
        errors = [((t - rows) ** 2).sum(axis=1) for t in tries]
        return np.stack(tries)[np.argmin(errors, axis=0), np.arange(len(rows))]

    return code


def power_of_two(rows: np.ndarray) -> np.ndarray:
    largest = np.maximum(np.abs(rows).max(axis=1), 1e-20)[:, None]
    scale = 2.0 ** np.ceil(np.log2(largest / LARGEST))
    return decode_e4m3(encode_e4m3(rows / scale)) * scale


def rotated(scheme: Scheme) -> Scheme:
    def code(rows: np.ndarray) -> np.ndarray:
        hadamard = np.ones((1, 1))
        while len(hadamard) < rows.shape[1]:
            hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
        hadamard = (hadamard / np.sqrt(len(hadamard))).astype(np.float32)
        return scheme(rows @ hadamard) @ hadamard

    return code


def less_mean(scheme: Scheme) -> Scheme:
    return lambda rows: scheme(rows - rows.mean(axis=0)) + rows.mean(axis=0)


def by_channel(scheme: Scheme) -> Scheme:
    def code(rows: np.ndarray) -> np.ndarray:
        size = np.abs(rows).mean(axis=0) + np.float32(1e-6)
        return scheme(rows / size) * size

    return code


SCHEMES: dict[str, Scheme] = {
    "largest / 448": best_of((LARGEST,)),
    "a power of two": power_of_two,
    "the best of 4 peaks": best_of(PEAKS[:4]),
    "the best of 8 peaks": through("fp8"),
    "of 33 even steps": best_of(tuple(np.linspace(LARGEST / 2, LARGEST, 33))),
    "8 peaks, rotated": rotated(through("fp8")),
    "8 peaks, less the mean": less_mean(through("fp8")),
    "by channel too": by_channel(best_of((LARGEST,))),
    "q8_0": through("q8_0"),
}


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and weights of the last queries [n, heads, dim] over one KV head's keys and values [T, dim]."""
    position, own = np.arange(len(k)), np.arange(len(k) - len(q), len(k))[:, None]
    hidden = position > own
    if window:
        hidden |= position <= own - window
    scores = np.where(hidden[None], -np.inf, np.einsum("qhd,kd->hqk", q, k))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ v, weights


def errors(scheme: Scheme, heads: list[tuple[Any, ...]]) -> tuple[float, float, float]:
    """rms of the outputs' relative errors with coded keys, KL of the weights then, rms with coded values."""
    found = []
    for q, k, v, window, out, weights in heads:
        by_keys, other = attend(q, scheme(k), v, window)
        by_values, _ = attend(q, k, scheme(v), window)
        size = (out**2).sum()
        divergence = (weights * (np.log(weights + 1e-30) - np.log(other + 1e-30))).sum(axis=-1).mean()
        found.append((((by_keys - out) ** 2).sum() / size, divergence, ((by_values - out) ** 2).sum() / size))
    keys, divergence, values = np.mean(found, axis=0)
    return float(keys**0.5), float(divergence), float(values**0.5)


def main() -> None:
    queries, keys, values, windows = attended(
        Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 768
    )
    share = queries.shape[2] // keys.shape[2]
    heads: list[tuple[Any, ...]] = []
    for layer, window in enumerate(windows):
        for h in range(keys.shape[2]):
            q = queries[layer, -QUERIES:, h * share : (h + 1) * share]
            head = (q, keys[layer, :, h].copy(), values[layer, :, h].copy(), window)
            heads.append((*head, *attend(*head)))
    print("| scale | keys: rms error | KL of weights | values: rms error |\n|---|---|---|---|")
    for name, scheme in SCHEMES.items():
        by_keys, divergence, by_values = errors(scheme, heads)
        print(f"| {name} | {by_keys:.2%} | {divergence:.1e} | {by_values:.2%} |", flush=True)


if __name__ == "__main__":
    main()
