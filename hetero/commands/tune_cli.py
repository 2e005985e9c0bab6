"""The command line of `hetero tune`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from hetero.commands.options import ENGINE, SERVER, load_settings, model_argument, settings_options
from hetero.commands.traffic_options import traffic_options

SETTINGS = tuple(
    name for name in (*SERVER, *ENGINE) if name not in ("host", "port", "log_level", "api_key_file")
)
OPTIONS = (
    "folder", "minutes", "workload", "rate", "burstiness", "concurrency", "seconds", "prompt_tokens",
    "output_tokens", "slo", "share", "max_kl", "lever", "replay",
)  # fmt: skip


@click.command()
@model_argument
@click.option(
    "-o", "--folder", type=click.Path(path_type=Path), required=True,
    help="Folder of the record. A search that was stopped goes on from there.",
)  # fmt: skip
@click.option(
    "--minutes", type=click.FloatRange(0.1, 10_000), default=20.0, show_default=True,
    help="Time for all of it, the confirmation included.",
)  # fmt: skip
@traffic_options(clients="8")
@click.option(
    "--seconds",
    type=click.FloatRange(1, 3600),
    default=15.0,
    show_default=True,
    help="Of load in each trial.",
)
@click.option(
    "--share", type=click.FloatRange(0, 1), default=0.95, show_default=True,
    help="Part of the answers that must keep --slo: 0.95 limits the 95th percentile.",
)  # fmt: skip
@click.option(
    "--max-kl", type=click.FloatRange(0, 10), metavar="NATS",
    help="Also try formats of the KV cache whose mean KL divergence is at most this. Without it, no setting "
    "may change a greedy answer.",
)  # fmt: skip
@click.option(
    "--lever", multiple=True, metavar="SETTING=V,V",
    help="What to vary, such as max_num_seqs=8,16. Default: all that may matter here.",
)  # fmt: skip
@click.option(
    "--replay", is_flag=True, help="Measure the best of the folder against the settings as they are again."
)
@settings_options(*SETTINGS)
def tune(**given: Any) -> None:
    """Find the settings that serve a workload best under limits, by measuring them on this machine.

    Maximises good answers a second (--slo), or tokens a second. Settings that fail or change a greedy
    answer are rejected. Ends with a table, and the best against the settings as they are on other traffic: if
    it is better there, too, it is written as FOLDER/hetero.toml.

    \b
    Example:
      hetero tune model.gguf -o tuning --workload chat -c 8 --slo ttft=600ms,tpot=50ms --max-kl 0.02
    """
    from hetero.commands import tune as command

    options = command.Options(**{name: given.pop(name) for name in OPTIONS})
    flags = {k: v for k, v in given.items() if v is not None and v != () and k != "config_file"}
    loaded = load_settings(given)
    sys.exit(command.tune(loaded.settings, flags, options))
