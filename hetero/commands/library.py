"""`hetero pull` and `hetero models`: what is there to be served, and how it gets there."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import click

from hetero.commands.options import json_option, load_settings, settings_options


@click.command()
@click.argument("model", metavar="hf:OWNER/REPO[:QUANT]")
@json_option
def pull(model: str, as_json: bool) -> None:
    """Download a model from Hugging Face into the model folder, or bring it up to date.

    QUANT is a part of a file's name, such as Q5_K_M; without it, Q4_K_M or what comes near. Started again
    after an interruption it goes on where it stopped. What has arrived is checked against its SHA-256.

    \b
    Example:
      hetero pull hf:bartowski/Qwen2.5-7B-Instruct-GGUF:Q5_K_M
      hetero serve Qwen2.5-7B-Instruct-Q5_K_M
    """
    sys.exit(_pull(model, as_json))


def _pull(model: str, as_json: bool) -> int:
    from hetero.commands.inspect import fail
    from hetero.hub import download
    from hetero.hub_names import parse_hub_name
    from hetero.model_folder import ModelError, model_name, models_folder
    from hetero.screen import loading

    try:
        with loading() as progress:
            path = download(parse_hub_name(model), models_folder(), progress)
    except ModelError as exc:
        return fail(exc)
    except KeyboardInterrupt:
        print("hetero: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 1
    name = model_name(path)
    if as_json:
        print(json.dumps({"name": name, "path": str(path)}, indent=2, ensure_ascii=False))
    else:
        print(f"{path}\nServe it: hetero serve {name}")
    return 0


@click.command()
@click.option("--families", is_flag=True, help="List the model families that hetero computes itself.")
@settings_options("device", "threads", "ctx", "kv_memory", "kv_tokens", "kv_type")
@json_option
def models(families: bool, as_json: bool, **given: Any) -> None:
    """List the models in the model folder and the packaged one, and whether each would fit here.

    The engine is `native` where hetero computes a model itself, `fallback` where libllama does, with fewer
    features.

    \b
    Example:
      hetero models --ctx 32768
      hetero models --families --json
    """
    loaded = load_settings(given)
    sys.exit(_families(as_json) if families else _models(loaded.settings, as_json))


def _families(as_json: bool) -> int:
    from hetero.commands.inspect import print_table
    from hetero.plan.catalogue import native_families

    found = native_families()
    if as_json:
        table = [{"family": family, "models": models} for family, models in found]
        print(json.dumps(table, indent=2, ensure_ascii=False))
        return 0
    print_table(("family", "models"), found)
    print("\nAny other family that libllama knows runs through it, with fewer features.")
    return 0


def _models(settings: Any, as_json: bool) -> int:
    from hetero.commands.inspect import print_table
    from hetero.model_folder import models_folder
    from hetero.plan.catalogue import list_models
    from hetero.screen import format_count
    from hetero.sizes import format_size

    found = list_models(settings)
    if as_json:
        print(json.dumps([dataclasses.asdict(entry) for entry in found], indent=2, ensure_ascii=False))
        return 0
    rows = [
        (
            entry.name,
            entry.family or "-",
            format_count(entry.n_params) if entry.family else "-",
            format_size(entry.size_bytes) if entry.family else "-",
            entry.quantization or "-",
            f"{entry.context:,}" if entry.context else "-",
            {True: "yes", False: "no", None: "-"}[entry.fits],
            entry.engine if entry.engine != "none" else "-",
            entry.note,
        )
        for entry in found
    ]
    print_table(("name", "family", "parameters", "size", "quant", "context", "fits", "engine", ""), rows)
    print(f"\nmodel folder: {models_folder()}")
    return 0
