"""Times a model's layers on devices, by running stages of a few of them (see times.DeviceTimes).

    run of layers     layers [a, b) of the middle: the time of a layer among others, whose weights have
                      to come from memory again, and what a step costs outside of computation
    a layer each      of every class of layers, where there are several: how they share the run's time
    first, last       the layer at each end with the embedding or the output head: what these add

CPU devices are timed at the same time as each other: they share the machine's memory.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from backends.base import StageBackend
from backends.ggml.models.config import ModelConfig
from backends.ggml.stage import StageSpec
from hetero.kv_types import F16, KVTypes
from hetero.plan.devices import DeviceChoice
from hetero.plan.facts import layer_classes, layer_names, types_on
from hetero.plan.probe import Point, Probe
from hetero.plan.times import DeviceTimes
from hetero.screen import ProgressCallback
from quant.gguf import GGUFFile

TOKENS = (1, 2, 4, 8, 16, 64)
CONTEXTS = (128, 1024, 4096)  # and the attention windows in between: there the slope changes
MOST_ATTENDED = 1 << 16  # tokens that a measured step attends in all; beyond that times are extrapolated
RUN_BYTES = 48 << 20  # weights of the run of layers: more than a core's own cache
RUN_LAYERS = (2, 24)
ROUNDS = 3  # over all points, so that what else the machine does for a moment spoils none of them
ENOUGH = (1, 0.015)  # a point is done when it ran so often and for so many seconds in a round,
PLENTY = 0.2  # or for so many seconds, however often
OUTLIER = 4.0  # times the median: something else happened

OpenStage = Callable[[DeviceChoice, StageSpec], StageBackend]
Step = tuple[int, int]  # sequences of one token and their context; or tokens of a chunk, and 0
Points = dict[Step, Point]
Layers = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is timed: the model, the largest chunk of a prompt, how a stage of it is opened, in which formats
    the KV cache is kept where the device has them, and of how many layers the experts are in main memory.
    """

    gguf: GGUFFile
    config: ModelConfig
    chunk_tokens: int
    open_stage: OpenStage
    kv_types: KVTypes = F16
    host_experts: int = 0

    @property
    def classes(self) -> tuple[int, ...]:
        return layer_classes(self.gguf, self.config, self.host_experts)

    def types_on(self, choice: DeviceChoice) -> KVTypes:
        """The formats that a device really keeps."""
        return types_on(self.config, self.kv_types, choice.own_kernels)


def calibrate(
    subject: Subject, choices: Sequence[DeviceChoice], progress: ProgressCallback
) -> tuple[DeviceTimes, ...]:
    """Measure every device; some seconds each. Raises whatever opening or running a stage raises."""
    local = [i for i, choice in enumerate(choices) if shares_memory(choice)]
    teams = ([local] if local else []) + [[i] for i in range(len(choices)) if i not in local]
    stages = _stages(subject)
    found: dict[int, DeviceTimes] = {}
    done = 0
    for team in teams:
        members = [choices[i] for i in team]
        results: list[dict[Layers, Points]] = [{} for _ in team]
        for (first, last), steps in stages.items():
            names = ", ".join(choice.label for choice in members)
            progress(f"measuring {names}", done / (len(teams) * len(stages)))
            for result, points in zip(results, _measure(subject, members, first, last, steps), strict=True):
                result[first, last] = points
            done += 1
        found |= {i: _tables(subject, result) for i, result in zip(team, results, strict=True)}
    progress("measured", 1.0)
    return tuple(found[i] for i in range(len(choices)))


def shares_memory(choice: DeviceChoice) -> bool:
    """Whether a device computes from this machine's own memory, with its CPU."""
    return choice.device.kind == "cpu" and not choice.spec.endpoint and not choice.spec.worker


def _contexts(config: ModelConfig) -> list[int]:
    low, high = CONTEXTS[0], CONTEXTS[-1]
    return sorted({*CONTEXTS, *(w for w in config.layer_windows if w is not None and low < w < high)})


def _decoding(contexts: Iterable[int]) -> list[Step]:
    return [(t, x) for t in TOKENS for x in contexts if t * x <= MOST_ATTENDED]


def _stages(subject: Subject) -> dict[Layers, list[Step]]:
    """The stages to open, as layers [first, last), and the steps to time on each."""
    everything = [*_decoding(_contexts(subject.config)), (subject.chunk_tokens, 0)]
    stages = {_run_of_layers(subject): everything}
    examples = {layer for layer, _ in _examples(subject)}
    if len(examples) > 1:
        stages |= {(layer, layer + 1): everything for layer in examples}
    n_layer = subject.config.n_layer
    for end in ((0, 1), (n_layer - 1, n_layer)):
        stages.setdefault(end, _decoding(CONTEXTS[:1]))
    return stages


def _run_of_layers(subject: Subject) -> Layers:
    """Layers of the middle, neither first nor last where the model has others, RUN_BYTES large."""
    n_layer = subject.config.n_layer
    if n_layer < 3:
        return 0, 1
    layer = n_layer // 2
    nbytes = sum(subject.gguf.tensors[n].nbytes for n in layer_names(subject.config, layer))
    low, high = RUN_LAYERS
    count = min(max(low, -(-RUN_BYTES // nbytes)), high, n_layer - 2)
    first = 1 + (n_layer - 2 - count) // 2
    return first, first + count


def _examples(subject: Subject) -> list[tuple[int, float]]:
    """For each class of layers, a layer in the middle of the model and how much more work its own are.

    A class that is found at an end only, where an embedding or output head would be timed with it, has
    the layer in the middle that is most like it, and the ratio of the weights.
    """
    gguf, config = subject.gguf, subject.config
    classes = subject.classes
    sizes = [sum(gguf.tensors[n].nbytes for n in layer_names(config, i)) for i in range(config.n_layer)]
    inner = range(1, config.n_layer - 1) or range(1)
    found = []
    for kind in range(max(classes) + 1):
        own = classes.index(kind)
        layer = min(
            inner,
            key=lambda i: (
                classes[i] != kind,
                config.layer_windows[i] != config.layer_windows[own],
                abs(sizes[i] - sizes[own]),
            ),
        )
        found.append((layer, sizes[own] / sizes[layer]))
    return found


def _measure(
    subject: Subject, choices: Sequence[DeviceChoice], first: int, last: int, steps: Sequence[Step]
) -> list[Points]:
    """Time the steps on a stage of layers [first, last) on every device, all at the same time."""
    line = _Line(len(choices))

    def work(choice: DeviceChoice) -> Points:
        with line.entered(), contextlib.closing(_open(subject, choice, first, last)) as probe:
            runs = {step: probe.step(*step) for step in steps}
            for run in runs.values():
                run()  # builds its graph
            found: dict[Step, list[Point]] = {step: [] for step in steps}
            for _ in range(ROUNDS):
                for step, run in runs.items():
                    found[step] += line.time(run)
            return {step: _mean(points) for step, points in found.items()}

    # Threads that end with the stage: OpenMP keeps a team of workers for every living thread.
    with ThreadPoolExecutor(len(choices)) as pool:
        futures = [pool.submit(work, choice) for choice in choices]
        errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


def _open(subject: Subject, choice: DeviceChoice, first: int, last: int) -> Probe:
    contexts = _contexts(subject.config)
    most = max(t * x for t, x in _decoding(contexts))
    return Probe(
        lambda spec: subject.open_stage(choice, spec),
        subject.config,
        (first, last),
        (max(TOKENS), max(contexts), most, subject.chunk_tokens),
        subject.types_on(choice),
    )


class _Line:
    """Keeps threads in step: they time a point together, and go on until the last one has enough."""

    def __init__(self, count: int):
        self._count, self._pending = count, count
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(count, self._reset)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """A thread that fails lets the others fail instead of waiting for it."""
        try:
            yield
        except BaseException:
            self._barrier.abort()
            raise

    def time(self, step: Callable[[], Point]) -> list[Point]:
        """What a step takes, some times."""
        self._barrier.wait()
        points: list[Point] = []
        began, enough = time.perf_counter(), False
        while True:
            points.append(step())
            elapsed = time.perf_counter() - began
            if not enough and (elapsed >= PLENTY or (len(points) >= ENOUGH[0] and elapsed >= ENOUGH[1])):
                enough = True
                with self._lock:
                    self._pending -= 1
            if self._pending == 0:
                break
        self._barrier.wait()
        return points

    def _reset(self) -> None:
        self._pending = self._count


def _mean(points: Sequence[Point]) -> Point:
    """Not the least: a device that others use too is as slow as they make it. Outliers are left out."""
    limit = OUTLIER * statistics.median(p.total for p in points)
    kept = [p for p in points if p.total <= limit]
    return Point(*(statistics.fmean(getattr(p, name) for p in kept) for name in ("enter", "graph", "leave")))


def _tables(subject: Subject, measured: dict[Layers, Points]) -> DeviceTimes:
    """The times of one device, from what its stages took."""
    classes, contexts = subject.classes, _contexts(subject.config)
    examples, n_layer = _examples(subject), len(classes)
    first, last = _run_of_layers(subject)
    run = measured[first, last]
    several = len({layer for layer, _ in examples}) > 1

    def alone(kind: int, step: Step) -> float:
        layer, ratio = examples[kind]
        return ratio * (measured[layer, layer + 1][step].graph if several else 1.0)

    def layer(kind: int, step: Step) -> float:
        """The run's time, divided among its layers as they take it alone."""
        return run[step].graph * alone(kind, step) / sum(alone(k, step) for k in classes[first:last])

    def on_top(end: int) -> Sequence[float]:
        """What the stage of the layer at an end takes beyond that layer."""
        points = measured[end, end + 1]
        steps = _decoding(CONTEXTS[:1])
        return rising([max(0.0, points[s].graph - layer(classes[end], s)) for s in steps])

    def over_contexts(kind: int, tokens: int) -> list[float]:
        """What was not measured lies on a line with the last two that were."""
        values = rising([layer(kind, (tokens, x)) for x in contexts if (tokens, x) in run])
        for i in range(len(values), len(contexts)):
            slope = (values[i - 1] - values[i - 2]) / (contexts[i - 1] - contexts[i - 2])
            values.append(values[i - 1] + slope * (contexts[i] - contexts[i - 1]))
        return values

    def decode(kind: int) -> tuple[tuple[float, ...], ...]:
        columns = zip(*(over_contexts(kind, t) for t in TOKENS), strict=True)
        return tuple(zip(*(rising(column) for column in columns), strict=True))

    plain = [run[step] for step in _decoding(CONTEXTS[:1])]
    chunk = (subject.chunk_tokens, 0)
    return DeviceTimes(
        tokens=TOKENS,
        contexts=tuple(contexts),
        decode=tuple(decode(kind) for kind in range(len(examples))),
        chunk_tokens=subject.chunk_tokens,
        chunk=tuple(layer(kind, chunk) for kind in range(len(examples))),
        embed=tuple(on_top(0)),
        head=tuple(on_top(n_layer - 1)),
        enter=tuple(rising([p.enter for p in plain])),
        leave=tuple(rising([p.leave for p in plain])),
    )


def rising(values: Sequence[float]) -> list[float]:
    """The closest non-decreasing row (least squares): more work never takes less time.

    Pool adjacent violators: https://en.wikipedia.org/wiki/Isotonic_regression
    """
    pools: list[tuple[float, int]] = []  # mean, count
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return [mean for mean, count in pools for _ in range(count)]


__all__ = ["OpenStage", "Subject", "calibrate", "rising", "shares_memory"]
