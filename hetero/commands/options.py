"""Options that several commands share: settings as flags, and what every command spells alike."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hetero.config import SettingError
from hetero.settings import SPECS, flag_name

# What decides how a model is loaded; the rest of the settings are the server's.
ENGINE = (
    "device",
    "threads",
    "split",
    "objective",
    "pipeline_depth",
    "isolate",
    "engine",
    "cpu_moe",
    "ctx",
    "kv_memory",
    "kv_tokens",
    "kv_type",
    "ram_cache",
    "max_num_batched_tokens",
)
METAVARS = {
    "str": "TEXT",
    "list": "TEXT",
    "int": "N",
    "size": "SIZE",
    "path": "FILE",
    "counts": "N,N",
    "folder_limit": "DIR:SIZE",
    "kv_types": "TYPE",
    "spec": "off|ngram|store|draft:MODEL",
}
SERVER = tuple(name for name in SPECS if name not in (*ENGINE, "model"))


def settings_options(*names: str) -> Callable[[Callable], Callable]:
    """A click option for each setting. Values stay text: hetero.config reads all sources alike."""

    def decorate(command: Callable) -> Callable:
        for name in reversed(names):
            meta = SPECS[name].metadata
            several = meta["kind"] == "list"
            metavar = "|".join(meta.get("choices", ())) or meta.get("metavar") or METAVARS[meta["kind"]]
            option = click.option(flag_name(name), name, metavar=metavar, multiple=several, help=meta["help"])
            command = option(command)
        config = click.option(
            "--config", "config_file", type=click.Path(path_type=Path), help="Settings file."
        )
        return config(command)

    return decorate


def load_settings(given: dict[str, Any]) -> Any:
    """hetero.config.Loaded from the options that were given. Bad usage ends with exit code 2."""
    from hetero import config

    path = given.pop("config_file")
    flags = {name: value for name, value in given.items() if value is not None and value != ()}
    try:
        return config.load(flags, config_file=path)
    except SettingError as exc:
        print(f"hetero: {exc}", file=sys.stderr)
        sys.exit(2)


model_argument = click.argument("model", required=False)
model_option = click.option("-m", "--model", help="Path or name of the model. Default: the packaged one.")
temperature_option = click.option(
    "--temperature",
    type=click.FloatRange(0, 100),
    default=0.7,
    show_default=True,
    help="0 always takes the likeliest token.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for a program to read.")
