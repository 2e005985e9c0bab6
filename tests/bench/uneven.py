"""Two CPU devices of which one is made slower: is the measured plan the best cut?

    make bench-uneven ARGS="--factor 2 --step 2"

The second device sleeps after each step for as long as it computed (times factor - 1), while it is measured
as well as while it serves. Every cut is tried with 16 requests; the planned one and the even one are marked.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from backends.base import BatchLike, StageBackend
from backends.ggml.stage import StageSpec
from hetero import launch
from hetero.engine import Engine
from hetero.models import resolve
from hetero.pipeline import opening
from hetero.plan import devices
from hetero.plan.devices import DeviceChoice
from hetero.plan.make import AGAIN
from hetero.prepare import prepare
from hetero.request import Request
from hetero.sampling.params import SamplingParams
from hetero.settings import Settings

DEVICES = ("CPU:threads=1",) * 2
SLOTS, PROMPT, OUTPUT, CTX = 16, 64, 128, 256  # half a prompt token for each other, as plans assume


class Slowed:
    """A stage that takes `factor` times as long. See backends.base.StageBackend."""

    def __init__(self, stage: StageBackend, factor: float):
        self._stage, self._factor = stage, factor
        self.graph_seconds, self._prepared = 0.0, 0.0

    def prepare(self, batch: BatchLike, hidden: np.ndarray | None) -> None:
        start = time.perf_counter()
        self._stage.prepare(batch, hidden)
        self._prepared = time.perf_counter() - start

    def compute(self) -> np.ndarray:
        start = time.perf_counter()
        result = self._stage.compute()
        took = time.perf_counter() - start + self._prepared
        time.sleep((self._factor - 1) * took)
        self.graph_seconds = time.perf_counter() - start
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


def slow_down(factor: float) -> None:
    """Let every stage on the second of two CPU devices be slow."""
    second = devices.choose(DEVICES, 0, devices.list_devices())[1]

    class Opener(opening.StageOpener):
        def open(
            self, choice: DeviceChoice, spec: StageSpec, progress: Callable[[int], None] | None = None
        ) -> Any:
            stage = super().open(choice, spec, progress)
            return Slowed(stage, factor) if choice.spec.cores == second.spec.cores else stage

    opening.StageOpener = Opener  # type: ignore[misc]


def speed(engine: Engine, repeat: int) -> tuple[float, list[float], list[float]]:
    """Tokens per second of SLOTS requests that come together. Of the time after their prompts, by stage: the
    mean busy seconds of a step, and the share of the time that it was busy."""
    rng, found = np.random.default_rng(0), []
    busy, share = [0.0, 0.0], [0.0, 0.0]
    counters = engine.scheduler.counters
    for _ in range(repeat + 1):
        params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
        for i in range(SLOTS):
            prompt = rng.integers(100, 20000, PROMPT).tolist()
            engine.add(Request(str(i), prompt, params), lambda delta: None)
        done, start = counters.generated_tokens, time.perf_counter()
        while counters.generated_tokens < done + SLOTS:
            engine.step()
        before, steps, decoding = engine.stats(), counters.steps, time.perf_counter()
        while engine.step():
            pass
        end, after = time.perf_counter(), engine.stats()
        found.append(SLOTS * OUTPUT / (end - start))
        seconds = [b.busy_seconds - a.busy_seconds for a, b in zip(before.stages, after.stages, strict=True)]
        busy = [s / (counters.steps - steps) for s in seconds]
        share = [s / (end - decoding) for s in seconds]
    return statistics.median(found[1:]), busy, share


def try_split(settings: Settings, repeat: int) -> tuple[float, list[float], list[float]]:
    prepared = prepare(settings, _quiet)
    engine = launch.load(prepared, settings, _quiet)[0]._engine
    try:
        return speed(engine, repeat)
    finally:
        engine.runner.close()


def _quiet(*_: object) -> None:
    return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path or name; default: the packaged model")
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--step", type=int, default=2, help="try every so manyth cut")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    model: Path = resolve(args.model).path
    slow_down(args.factor)
    settings = Settings(model=str(model), device=DEVICES, ctx=CTX, kv_tokens=SLOTS * CTX, max_num_seqs=SLOTS)
    settings = dataclasses.replace(settings, objective="throughput")
    prepared = prepare(settings, _quiet, AGAIN)
    assert prepared.forecast is not None
    planned = tuple(last - first for first, last in (s.layers for s in prepared.plan.stages))
    layers = prepared.config.n_layer
    cuts = sorted({planned[0], layers // 2, *range(args.step, layers, args.step)})
    results = {}
    print(f"{model.name}, second device slowed {args.factor}x\n")
    print("| layers | tok/s | decode step, ms | busy | |\n|---|---:|---:|---:|---|")
    for cut in cuts:
        split = (cut, layers - cut)
        results[cut], busy, shares = try_split(dataclasses.replace(settings, split=split), args.repeat)
        note = "planned" if split == planned else "even" if cut == layers // 2 else ""
        if split == planned:
            predicted = [1e3 * s for s in prepared.forecast.stage_seconds]
            note += ", predicted " + " / ".join(f"{ms:.1f} ms" for ms in predicted)
        shown = " / ".join(f"{1e3 * s:.1f}" for s in busy)
        shown += " | " + " / ".join(f"{share:.0%}" for share in shares)
        print(f"| {cut}, {layers - cut} | {results[cut]:.0f} | {shown} | {note} |", flush=True)
    best = max(results.values())
    print(
        f"\nplanned over even: {results[planned[0]] / results[layers // 2]:.2f}x; "
        f"planned over the best cut tried: {results[planned[0]] / best:.2f}x"
    )


if __name__ == "__main__":
    main()
