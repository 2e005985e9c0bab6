"""Times of a device that nobody measured: bytes through a guessed bandwidth, products at a guessed rate."""

from __future__ import annotations

from collections.abc import Sequence

from backends.base import RECURRENT
from hetero.plan.devices import DeviceChoice
from hetero.plan.host import usable_cores
from hetero.plan.planner import ModelFacts
from hetero.plan.times import DeviceTimes

GIGA = 1e9
# kind of device: bytes a second from its memory, multiply-adds a second; a CPU's per thread
RATES = {"cpu": (6 * GIGA, 40 * GIGA), "gpu": (400 * GIGA, 10e12), "igpu": (60 * GIGA, 1e12)}
OTHER = (40 * GIGA, 1e12)
LINK = (0.2e-3, 1 * GIGA)  # a step's way to another machine: seconds, bytes a second
TOKENS, CONTEXTS = (1, 64), (128, 4096)
CHUNK = 512
BYTES_PER_WEIGHT = 0.65  # of 4 to 6 bits


def estimate(facts: ModelFacts, classes: Sequence[int], choice: DeviceChoice, row_bytes: int) -> DeviceTimes:
    """Times to compare devices by when they were not measured; right within a factor of a few.

    `row_bytes`: what a token's hidden row takes on its way between stages.
    """
    bandwidth, rate = RATES.get(choice.device.kind, OTHER)
    if choice.device.kind == "cpu":
        bandwidth, rate = bandwidth * max(1, choice.threads), rate * max(1, choice.threads)

    def matrix(nbytes: float, rows: float) -> float:
        return max(nbytes / bandwidth, rows * nbytes / BYTES_PER_WEIGHT / rate)

    experts = facts.moved_bytes or (0,) * facts.n_layer
    cores = RATES["cpu"][0] * max(1, usable_cores())

    def layer_seconds(layer: int, rows: float) -> float:
        return matrix(facts.layer_bytes[layer], rows) + experts[layer] / cores

    kv_bytes = facts.token_bytes(not choice.own_kernels)
    examples = [classes.index(kind) for kind in range(max(classes) + 1)]
    decode = tuple(
        tuple(
            tuple(
                layer_seconds(layer, rows)
                + rows * min(x, facts.layer_windows[layer] or x) * kv_bytes[layer] / bandwidth
                + rows * 2 * (facts.layer_windows[layer] == RECURRENT) * facts.state_bytes / bandwidth
                for x in CONTEXTS
            )
            for rows in TOKENS
        )
        for layer in examples
    )
    remote = choice.spec.endpoint or choice.spec.worker
    fixed, link = LINK if remote else (0.02e-3, 5 * GIGA)
    hop = tuple(fixed + rows * row_bytes / link for rows in TOKENS)
    return DeviceTimes(
        tokens=TOKENS,
        contexts=CONTEXTS,
        decode=decode,
        chunk_tokens=CHUNK,
        chunk=tuple(layer_seconds(layer, CHUNK) for layer in examples),
        embed=(0.0,) * len(TOKENS),
        head=tuple(matrix(facts.head_bytes, rows) for rows in TOKENS),
        enter=hop,
        leave=hop,
        measured=False,
    )
