"""`hetero devices`: what can compute here."""

from __future__ import annotations

import dataclasses
import json

from hetero.commands.inspect import fail, print_table
from hetero.sizes import format_size


def devices(as_json: bool) -> int:
    """List devices, and what of the list deserves a word. Exit code 1 when ggml cannot be loaded."""
    from hetero.plan.devices import hiding_notes, same_card
    from hetero.prepare import LaunchError, list_devices

    try:
        found = list_devices()
    except LaunchError as exc:
        return fail(exc)
    hidden = same_card(found)
    if as_json:
        table = [dataclasses.asdict(d) | {"same_as": hidden.get(d.name)} for d in found]
        print(json.dumps(table, indent=2, ensure_ascii=False))
        return 0
    rows = [
        (
            d.name,
            d.kind,
            f"{format_size(d.free_bytes)} of {format_size(d.total_bytes)} free",
            d.backend,
            d.device_id if d.device_id != d.name else "",
            d.description + (f" (the same card as {hidden[d.name]})" if d.name in hidden else ""),
        )
        for d in found
    ]
    print_table(("name", "kind", "memory", "backend", "id", "description"), rows)
    for note in hiding_notes(found):
        print(f"\nnote: {note}")
    return 0
