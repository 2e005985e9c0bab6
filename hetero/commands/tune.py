"""`hetero tune`: from options to a search, its record and its winner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero.bench.levers import LeverError, default_levers, parse_lever
from hetero.bench.load import Load
from hetero.bench.recorded import Recorded, find_workload
from hetero.bench.trial import Traffic
from hetero.bench.tune import TuneError, Tuning, winner_toml
from hetero.bench.tune_report import markdown
from hetero.bench.workload import WorkloadError
from hetero.commands.bench import UsageError, burstiness_of, limits_of, progress, sizes_of
from hetero.commands.inspect import fail
from hetero.files import write_whole
from hetero.settings import Settings

if TYPE_CHECKING:
    from hetero.prepare import Prepared

CLIENTS = 8
SESSIONS_A_SECOND = 40  # more than are begun in a trial's time


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line, as they were given."""

    folder: Path
    minutes: float
    workload: str
    rate: float | None
    burstiness: float | None
    concurrency: int | None
    seconds: float
    prompt_tokens: str | None
    output_tokens: str | None
    slo: str | None
    share: float
    max_kl: float | None
    lever: tuple[str, ...]
    replay: bool


def tune(settings: Settings, given: Mapping[str, Any], options: Options) -> int:
    """Search, confirm, print. `given`: the settings of the command line. Exit code 1 when that cannot be."""
    from hetero.kv.fingerprint import model_digest
    from hetero.prepare import LaunchError, prepare

    try:
        if settings.tls_cert is not None:
            raise UsageError(
                "tls_cert: trials are asked over plain HTTP; leave it out, with --config if need be"
            )
        traffic = _traffic(options)
        with progress() as show:
            prepared = prepare(settings, lambda what, done: show(what, round(100 * done), 100))
            levers = [parse_lever(text) for text in options.lever] or default_levers(
                settings, _threads(prepared), len(prepared.plan.stages), options.max_kl is not None
            )
            model = str(prepared.model.path)
            tuning = Tuning(given, model, levers, traffic, options.max_kl, options.folder)
            identity = model_digest(prepared.gguf).hex()
            del prepared
            tuning.open(identity)
            search = tuning.known() if options.replay else tuning.search(60 * options.minutes, show)
            best, confirmation = search.contender, None
            if options.replay and best is None:
                raise TuneError(f"{tuning.folder}: there is nothing to replay: no trial of other settings")
            if best is not None:
                confirmation = tuning.confirm(best, show)
        if best is not None and confirmation is not None and confirmation.holds:
            write_whole(options.folder / "hetero.toml", winner_toml(given, best))
    except (UsageError, WorkloadError, LeverError, LaunchError, TuneError) as error:
        return fail(error)
    except OSError as error:
        return fail(TuneError(f"{options.folder}: {error.strerror or error}"))
    except KeyboardInterrupt:
        return fail(TuneError(f"stopped; the same command goes on with {options.folder}"))
    print(markdown(traffic, tuning.outcomes, confirmation))
    return 0


def _threads(prepared: Prepared) -> int:
    """How many threads compute by the setting `threads`; 0 where it decides nothing: no CPU, or its own."""
    used = [prepared.choices[stage.index] for stage in prepared.plan.stages]
    return max((c.threads for c in used if "threads=" not in c.label), default=0)


def _traffic(options: Options) -> Traffic:
    if options.rate is not None and options.concurrency is not None:
        raise UsageError("--rate and --concurrency both say how requests arrive: give one of them")
    burstiness = burstiness_of(options.burstiness, options.rate is not None)
    workload = find_workload(options.workload)
    sizes, limits = sizes_of(options.prompt_tokens, options.output_tokens), limits_of(options.slo)
    held_out: list[Recorded] = []
    if isinstance(workload, Recorded):
        as_recorded = workload.is_timed and options.rate is None and options.concurrency is None
        workload, *held_out = workload.parts(options.seconds if as_recorded else None)
        if as_recorded:
            load = Load(seconds=options.seconds)
            return Traffic(
                workload, sizes, load, limits, options.share, len(workload.recorded), tuple(held_out)
            )
    if options.rate is not None:
        load = Load(options.rate, burstiness, seconds=options.seconds)
        sessions = max(8, round(2 * options.rate * options.seconds))
    else:
        load = Load(concurrency=options.concurrency or CLIENTS, seconds=options.seconds)
        sessions = round(SESSIONS_A_SECOND * options.seconds)
    return Traffic(workload, sizes, load, limits, options.share, sessions, tuple(held_out))
