"""Prints, as JSON, what an engine answers to prompts; a process of its own, for another ggml build.

    run_answers.py MODEL SETTINGS PROMPTS BATCH TOKENS

SETTINGS and PROMPTS are JSON. Prints {"answers": token ids by prompt, "counters": by stage}.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from engine.answers import BASE, answers  # noqa: E402  found through the path above

from hetero.kv_types import parse_kv_types  # noqa: E402
from hetero.pipeline import deadlines  # noqa: E402

BUSY_SECONDS = 300.0  # a software driver compiles for long where others compute too


def main() -> None:
    model, changes, prompts, batch, tokens = sys.argv[1:]
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(changes).items()}
    if "kv_type" in given:
        given["kv_type"] = parse_kv_types(given["kv_type"])
    # each other number of rows is another program, and a software driver takes seconds to compile it
    settings = dataclasses.replace(BASE, spec="off", **given)
    deadlines.FIRST_SECONDS = deadlines.NEW_SECONDS = deadlines.DRIVER_SECONDS = BUSY_SECONDS
    out, stats = answers(Path(model), settings, json.loads(prompts), int(batch), tokens=int(tokens))
    print(json.dumps({"answers": out, "counters": [s.counters for s in stats.stages]}))


if __name__ == "__main__":  # spawned children import this file
    main()
