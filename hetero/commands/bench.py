"""`hetero bench`: from options to a table and a record."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hetero.bench.distributions import Lengths, parse_lengths
from hetero.bench.experiment import Plan, Show, as_record, is_good, measure
from hetero.bench.load import Load
from hetero.bench.plot import PlotError, check_plot, plot
from hetero.bench.recorded import Recorded, find_workload
from hetero.bench.report import markdown
from hetero.bench.results import Limits, parse_limits
from hetero.bench.server_info import ServerError, ServerInfo, find_out
from hetero.bench.workload import Sizes, Workload, WorkloadError
from hetero.commands.inspect import fail
from hetero.files import write_whole

SESSIONS = 64


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line, as they were given."""

    model: str | None
    workload: str
    rate: float | None
    burstiness: float | None
    concurrency: int | None
    sweep: str | None
    sessions: int | None
    duration: float | None
    warm_up: int
    repeat: int
    prompt_tokens: str | None
    output_tokens: str | None
    slo: str | None
    natural_end: bool
    temperature: float
    endpoint: str | None
    api_key: str | None
    seed: int
    record: Path | None
    out: Path | None
    plot: Path | None


class UsageError(Exception):
    """Options that do not go together: one line."""


def bench(urls: Sequence[str], options: Options, as_json: bool) -> int:
    """Measure the servers. Exit code 1 when something was not answered, or nothing could be measured."""
    try:
        if options.record is not None:
            return _record(urls, options)
        plan = make_plan(options)
        if options.plot is not None:
            check_plot(options.plot)
        if options.out is not None and not options.out.parent.is_dir():
            raise UsageError(f"--out {options.out}: there is no folder {options.out.parent}")
        servers = asyncio.run(_servers(urls, options))
        with progress() as show:
            results = measure(plan, servers, show)
    except (UsageError, WorkloadError, ServerError, PlotError) as error:
        return fail(error)
    except OSError as error:
        return fail(UsageError(f"--record {options.record}: {error.strerror or error}"))
    except KeyboardInterrupt:
        return fail(UsageError("stopped; nothing was recorded"))
    record = as_record(plan, servers, results)
    print(json.dumps(record) if as_json else markdown(plan, servers, results))  # first: it cannot fail
    flag, path = "--out", options.out
    try:
        if path is not None:
            write_whole(path, json.dumps(record, indent=1) + "\n")
        flag, path = "--plot", options.plot
        if path is not None:
            plot(path, f"{plan.workload.name}: {plan.workload.title}", results)
    except OSError as error:
        return fail(UsageError(f"{flag} {path}: {error.strerror or error}"))
    return 0 if is_good(results) else 1


def _record(urls: Sequence[str], options: Options) -> int:
    """Write the traffic of a server to a file."""
    from hetero.bench.record import record

    if len(urls) != 1 or options.duration is None:
        raise UsageError("--record needs one URL, and --duration for how long to record")
    if not options.record or not options.record.parent.is_dir():
        raise UsageError(f"--record {options.record}: there is no such folder")
    with progress() as show:
        named = f"recording {urls[0]}"
        count = asyncio.run(
            record(urls[0], options.api_key, options.duration, options.record, lambda n: show(named, n, n))
        )
    print(f"{count} requests in {options.record}; hetero bench -w {options.record} plays them again")
    return 0


def make_plan(options: Options) -> Plan:
    """Raises UsageError or WorkloadError naming the option."""
    workload = find_workload(options.workload)
    sizes, limits = sizes_of(options.prompt_tokens, options.output_tokens), limits_of(options.slo)
    sessions = options.sessions or (len(workload.recorded) if isinstance(workload, Recorded) else SESSIONS)
    loads = _loads(options, workload)
    return Plan(workload, sizes, loads, sessions, options.warm_up, options.repeat, options.seed, limits)


def sizes_of(prompt_tokens: str | None, output_tokens: str | None) -> Sizes:
    """What the options of these names say. Raises UsageError."""
    return Sizes(_lengths("--prompt-tokens", prompt_tokens), _lengths("--output-tokens", output_tokens))


def _lengths(flag: str, text: str | None) -> Lengths | None:
    try:
        return None if text is None else parse_lengths(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def limits_of(slo: str | None) -> Limits:
    """What --slo says. Raises UsageError."""
    try:
        return Limits() if slo is None else parse_limits(slo)
    except ValueError as error:
        raise UsageError(f"--slo: {error}") from None


def _loads(options: Options, workload: Workload | Recorded) -> tuple[Load, ...]:
    given = [name for name in ("rate", "concurrency", "sweep") if getattr(options, name) is not None]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} both say how requests arrive: give one of them")
    at_a_rate = options.rate is not None or (options.sweep or "").startswith("rate")
    burstiness = burstiness_of(options.burstiness, at_a_rate)
    if options.sweep is not None:
        return _sweep(options, burstiness)
    if options.rate is not None:
        return (Load(options.rate, burstiness, seconds=options.duration),)
    if options.concurrency is None and isinstance(workload, Recorded) and workload.is_timed:
        return (Load(seconds=options.duration),)
    return (Load(concurrency=options.concurrency or 1, seconds=options.duration),)


def burstiness_of(given: float | None, at_a_rate: bool) -> float:
    """What --burstiness says. Raises UsageError where it would mean nothing."""
    if given is not None and not at_a_rate:
        raise UsageError("--burstiness is of arrivals at a rate; --rate sets one")
    return 1.0 if given is None else given


def _sweep(options: Options, burstiness: float) -> tuple[Load, ...]:
    what, _, values = (options.sweep or "").partition("=")
    try:
        if what == "concurrency":
            counts = [int(v) for v in values.split(",")]
            if all(1 <= n <= 4096 for n in counts):
                return tuple(Load(concurrency=n, seconds=options.duration) for n in counts)
        elif what == "rate":
            rates = [float(v) for v in values.split(",")]
            if all(0.001 <= r <= 1e5 for r in rates):
                return tuple(Load(r, burstiness, seconds=options.duration) for r in rates)
    except ValueError:
        pass
    raise UsageError(f"--sweep {options.sweep}: must be concurrency=1,2,4 or rate=0.5,1,2")


async def _servers(urls: Sequence[str], options: Options) -> list[ServerInfo]:
    names = _names(urls)
    return [
        await find_out(
            url,
            name,
            options.model,
            options.api_key,
            options.endpoint,
            not options.natural_end,
            options.temperature,
        )
        for url, name in zip(urls, names, strict=True)
    ]


def _names(urls: Sequence[str]) -> list[str]:
    short = [url.rstrip("/").removesuffix("/v1").partition("://")[2] or url for url in urls]
    return [f"{name} ({i + 1})" if short.count(name) > 1 else name for i, name in enumerate(short)]


@contextmanager
def progress() -> Iterator[Show]:
    """A bar on a terminal; nothing where nobody looks."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")

        def show(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        yield show
