"""`hetero devices --calibrate`: time a model's layers on the devices, for plans to come."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from hetero.commands.inspect import fail, print_table
from hetero.screen import loading
from hetero.settings import Settings

if TYPE_CHECKING:
    from hetero.plan.times import DeviceTimes

SHOWN = (1, 8, 64)  # sequences


def calibrate(settings: Settings, as_json: bool) -> int:
    """Measure the devices of --device, else all, with the model's layers, and print their times.

    Exit code 1 when a device cannot be measured.
    """
    from hetero.prepare import LaunchError, measure_devices

    try:
        with loading() as progress:
            measured = measure_devices(settings, progress)
    except LaunchError as exc:
        return fail(exc)
    if as_json:
        print(json.dumps({label: dataclasses.asdict(t) for label, t in measured}, indent=2))
        return 0
    context = measured[0][1].contexts[1]
    few = tuple(f"{n} seq" for n in SHOWN)
    header = ("device", "layer", *few, "prompt", *(f"head, {n}" for n in SHOWN), "hand over")
    rows = [row for label, times in measured for row in _rows(label, times, context)]
    print(f"milliseconds of a layer at {context} tokens of context; prompt: per 1000 tokens\n")
    print_table(header, rows)
    return 0


def _rows(label: str, times: DeviceTimes, context: int) -> list[tuple[str, ...]]:
    """A row for each class of layers; what is of the device stands in the first."""
    rows = []
    for kind in range(len(times.decode)):
        layer = [_ms(times.layer(kind, n, context)) for n in SHOWN]
        head = [_ms(times.at("head", n)) for n in SHOWN]
        hop = _ms(times.at("enter", SHOWN[1]) + times.at("leave", SHOWN[1]))
        of_device = (*head, hop) if kind == 0 else ("",) * 4
        rows.append(
            (label if kind == 0 else "", str(kind), *layer, _ms(times.prompt(kind, 1000)), *of_device)
        )
    return rows


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"
