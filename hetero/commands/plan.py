"""`hetero plan`: what of a model would sit on which device, why, and how fast that would be."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from hetero.commands.inspect import fail, print_table
from hetero.screen import device_title, loading
from hetero.settings import FolderLimit, Settings
from hetero.sizes import format_size

if TYPE_CHECKING:
    from hetero.plan.devices import DeviceChoice
    from hetero.plan.draft import DraftPlan
    from hetero.plan.forecast import Forecast
    from hetero.plan.planner import StagePlan
    from hetero.prepare import Prepared

BAR = 48  # characters
USES = (("weights", "#", "cyan"), ("KV cache", "=", "green"), ("compute", "+", "yellow"))


def plan(settings: Settings, as_json: bool, calibrate: bool | None) -> int:
    """Print the plan. Exit code 1 when it does not fit.

    `calibrate`: measure the devices again (True), or never (False); None: where it was never done.
    """
    from hetero.plan.make import AGAIN, GUESSED, MISSING
    from hetero.prepare import LaunchError, prepare, require_fit

    measure = {None: MISSING, True: AGAIN, False: GUESSED}[calibrate]
    try:
        with loading() as progress:
            prepared = prepare(settings, progress, measure)
    except LaunchError as exc:
        return fail(exc)
    disk = None if prepared.facts.recurrent else settings.disk_cache
    if as_json:
        print(json.dumps(as_table(prepared, disk), indent=2, ensure_ascii=False))
        return 0 if prepared.plan.fits else 1
    _show(prepared, disk)
    try:
        require_fit(prepared)
    except LaunchError as exc:
        return fail(exc)
    return 0


def as_table(prepared: Prepared, disk: FolderLimit | None = None) -> dict[str, Any]:
    """The plan as --json prints it."""
    made = prepared.plan
    table = dataclasses.asdict(made)
    for stage, planned in zip(table["stages"], made.stages, strict=True):
        stage["threads"] = prepared.choices[planned.index].threads
        stage["total_bytes"] = planned.total_bytes
    return table | {
        "model": str(prepared.model.path),
        "engine": "hetero" if prepared.llama is None else "libllama",
        "threads": prepared.choice.threads,
        "fits": made.fits,
        "total_bytes": made.total_bytes,
        "short_by_bytes": made.short_by_bytes,
        "host": dataclasses.asdict(prepared.host)
        | {
            "tokens": prepared.host.tokens,
            "nbytes": prepared.host.nbytes,
            "formats": dict(_host_tokens(prepared)),
        },
        "disk": disk and {"nbytes": disk.nbytes, "formats": dict(_disk_tokens(prepared, disk))},
        "draft": None if prepared.draft is None else _draft_table(prepared.draft),
        "forecast": None if prepared.forecast is None else dataclasses.asdict(prepared.forecast),
    }


def _draft_table(draft: DraftPlan) -> dict[str, Any]:
    table = dataclasses.asdict(draft.stage) | {"total_bytes": draft.stage.total_bytes}
    return table | {
        "model": str(draft.model.path),
        "threads": draft.choice.threads,
        "kv_tokens": draft.planned.plan.kv_tokens,
    }


def _show(prepared: Prepared, disk: FolderLimit | None = None) -> None:
    made, view = prepared.plan, prepared.forecast
    print(f"model      {prepared.model.path}\n")
    header = ("device", "layers", "weights", "KV cache", "compute", "total", "free", "step")
    rows = [_row(stage, prepared.choices[stage.index]) for stage in made.stages]
    if prepared.draft is not None:
        rows.append(_row(prepared.draft.stage, prepared.draft.choice, "draft model"))
    print_table(header, rows)
    print()
    _show_bars(made.stages)
    print()
    if view is not None:
        _show_speed(view)
    elif prepared.native is not None:
        print("speed      not measured yet; --calibrate does it")
    _show_caches(prepared, disk)
    print(f"context    {made.max_model_len:,}")
    if prepared.draft is not None:
        tokens = prepared.draft.planned.plan.kv_tokens
        print(f"draft      {prepared.draft.model.path}, {tokens:,} KV tokens")
    if len(made.stages) > 1:
        for stage in made.stages:
            print(f"why        {stage.device}: layers {_layers(stage)}: {stage.reason}")
    for reason in made.reasons:
        print(f"why        {reason}")
    for note in made.notes:
        print(f"note       {note}")


def _show_caches(prepared: Prepared, disk: FolderLimit | None) -> None:
    made, host = prepared.plan, prepared.host
    for group in made.groups:
        if group.recurrent:
            size = format_size(prepared.facts.state_bytes * len(group.layers))
            print(f"states     {group.num_blocks}, of {size} each, for {len(group.layers)} recurrent layers")
            continue
        span = "all tokens" if group.window is None else f"a window of {group.window:,} tokens"
        print(f"KV blocks  {group.num_blocks:,}, for {len(group.layers)} layers that attend {span}")
    print(f"KV tokens  {made.kv_tokens:,}")
    kept = dict.fromkeys(str(stage.kv_types) for stage in made.stages)
    print(f"KV format  {' and '.join(kept)}")
    if made.formats:
        in_others = ", ".join(f"{one.tokens:,} as {one.name}" for one in made.formats)
        print(f"           tokens in the same memory: {in_others}")
    size = f"{host.tokens:,} tokens in {format_size(host.nbytes)}" if host.nbytes else "none"
    print(f"RAM cache  {size} ({host.why})")
    if host.nbytes:
        in_others = ", ".join(f"{n:,} as {name}" for name, n in _host_tokens(prepared))
        print(f"           tokens in the same memory: {in_others}")
    if disk:
        in_each = ", ".join(f"{n:,} as {name}" for name, n in _disk_tokens(prepared, disk))
        print(f"disk cache {disk}: tokens {in_each}")


def _host_tokens(prepared: Prepared) -> list[tuple[str, int]]:
    """(format, tokens that the RAM cache would hold in it): its slots are as large as the pools' blocks."""
    from hetero.plan.planner import BLOCK_SIZE

    pools = sum(stage.kv_bytes for stage in prepared.plan.stages)
    blocks = prepared.host.tokens // BLOCK_SIZE
    return [(one.name, blocks * pools // one.nbytes * BLOCK_SIZE) for one in prepared.plan.formats]


def _disk_tokens(prepared: Prepared, disk: FolderLimit) -> list[tuple[str, int]]:
    """(format, tokens that the disk cache would hold in it): a file for the block of each group."""
    from hetero.kv.disk_entry import HEADER_BYTES
    from hetero.kv.disk_folder import bytes_on_disk
    from hetero.plan.planner import BLOCK_SIZE

    pools, block = sum(s.kv_bytes for s in prepared.plan.stages), sum(prepared.host.block_bytes)
    found = []
    for one in prepared.plan.formats:
        size = bytes_on_disk(HEADER_BYTES + block * one.nbytes // pools)
        found.append((one.name, disk.nbytes // size * BLOCK_SIZE))
    return found


def _row(stage: StagePlan, choice: DeviceChoice, what: str = "") -> tuple[str, ...]:
    sizes = (stage.weight_bytes, stage.kv_bytes, stage.compute_bytes, stage.total_bytes, stage.free_bytes)
    step = "-" if stage.seconds is None else f"{1e3 * stage.seconds:.2f} ms"
    title = device_title(stage.device, choice.threads)
    return (title, what or _layers(stage), *map(format_size, sizes), step)


def _layers(stage: StagePlan) -> str:
    first, last = stage.layers[0], stage.layers[1] - 1
    return f"{first}" if first == last else f"{first}-{last}"


def _show_bars(stages: tuple[StagePlan, ...]) -> None:
    """A line for each device: how much of its free memory goes where; colours on a terminal."""
    width = max(len(stage.device) for stage in stages)
    if not sys.stdout.isatty():
        for stage in stages:
            bar = "".join(mark * count for mark, count, _ in _segments(stage))
            print(f"{stage.device.ljust(width)}  [{bar}]")
        print(" " * width + "  " + ", ".join(f"{mark} {name}" for name, mark, _ in USES) + ", . free")
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for stage in stages:
        line = Text(f"{stage.device.ljust(width)}  ")
        for mark, count, colour in _segments(stage):
            line.append(("█" if mark != "." else "░") * count, style=colour)
        console.print(line)
    legend = Text(" " * (width + 2))
    for name, _, colour in USES:
        legend.append("█ ", style=colour).append(f"{name}  ")
    console.print(legend.append("░ free", style="dim"))


def _segments(stage: StagePlan) -> list[tuple[str, int, str]]:
    """(mark, characters, colour) of each part of a device's bar: what rounds to nothing has none."""
    whole = max(stage.free_bytes, stage.total_bytes, 1)
    ends, total = [0], 0
    for nbytes in (stage.weight_bytes, stage.kv_bytes, stage.compute_bytes):
        total += nbytes
        ends.append(round(BAR * total / whole))
    parts = [(mark, b - a, colour) for (_, mark, colour), a, b in zip(USES, ends, ends[1:], strict=False)]
    return [*parts, (".", BAR - ends[-1], "dim")]


def _requests(count: int) -> str:
    return f"{count:,} request{'' if count == 1 else 's'}"


def _show_speed(view: Forecast) -> None:
    source = "predicted from measurements" if view.measured else "guessed from sizes, nothing was measured"
    print(
        f"speed      {view.tokens_per_second:,.0f} tokens/s for {_requests(view.requests)} at "
        f"{view.context:,} tokens, {view.single_tokens_per_second:,.0f} for one alone ({source})"
    )
    for other in view.alternatives:
        layers = ", ".join(f"{device} {count}" for device, count in other.layers)
        fit = f"; {format_size(other.short_by_bytes)} short" if other.short_by_bytes else ""
        print(
            f"compare    {other.name} split ({layers}): {other.tokens_per_second:,.0f} tokens/s, "
            f"{other.single_tokens_per_second:,.0f} for one alone, {other.kv_tokens:,} KV tokens{fit}"
        )
