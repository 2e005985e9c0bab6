"""Command line of hetero. Click only: everything that computes is imported inside the commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hetero import __version__
from hetero.config import SPECS, SettingError, flag_name

# What decides how a model is loaded; the rest of the settings are the server's.
ENGINE = ("device", "threads", "ctx", "kv_memory", "kv_tokens", "max_num_batched_tokens")
METAVARS = {"str": "TEXT", "list": "TEXT", "int": "N", "size": "SIZE", "path": "FILE", "choice": "LEVEL"}
SERVER = tuple(name for name in SPECS if name not in (*ENGINE, "model"))


def settings_options(*names: str) -> Callable[[Callable], Callable]:
    """A click option for each setting. Values stay text: hetero.config reads all sources alike."""

    def decorate(command: Callable) -> Callable:
        for name in reversed(names):
            meta = SPECS[name].metadata
            several = meta["kind"] == "list"
            option = click.option(
                flag_name(name), name, metavar=METAVARS[meta["kind"]], multiple=several, help=meta["help"]
            )
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


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="hetero")
def main() -> None:
    """One fast LLM server out of a box with mismatched accelerators."""


@main.command()
@model_argument
@settings_options(*SERVER, *ENGINE)
@click.option("--print-config", is_flag=True, help="Show each setting with its source, and exit.")
def serve(print_config: bool, **given: Any) -> None:
    """Serve MODEL over the OpenAI API.

    \b
    Example:
      hetero serve ~/models/llama-3.2-1b-q5_k_m.gguf --port 9000 --ctx 8192
    """
    loaded = load_settings(given)
    from hetero.commands import serve as command

    sys.exit(command.print_config(loaded) if print_config else command.serve(loaded.settings))


@main.command()
@click.argument("prompt")
@model_option
@settings_options(*ENGINE, "chat_template")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Stop after this many tokens.")
@temperature_option
@click.option("--seed", type=int, help="The same seed gives the same text.")
@click.option("--raw", is_flag=True, help="Continue PROMPT as it is, without the chat template.")
def run(prompt: str, max_tokens: int | None, temperature: float, seed: int | None, raw: bool, **given: Any):
    """Answer PROMPT and exit. A PROMPT of - is read from standard input.

    \b
    Example:
      hetero run "Name three rivers." --max-tokens 60
    """
    loaded = load_settings(given)
    from hetero.commands import generate as command

    text = sys.stdin.read() if prompt == "-" else prompt
    choices = command.Choices(max_tokens, temperature, seed)
    sys.exit(command.run(loaded.settings, text, choices, raw=raw))


@main.command()
@model_option
@settings_options(*ENGINE, "chat_template")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer, in tokens.")
@temperature_option
@click.option("--seed", type=int, help="The same seed gives the same conversation.")
@click.option("--system", help="System message of the conversation.")
def chat(max_tokens: int | None, temperature: float, seed: int | None, system: str | None, **given: Any):
    """Talk to a model in the terminal. An empty line or Ctrl-D ends it; Ctrl-C stops an answer.

    \b
    Example:
      hetero chat -m ~/models/gemma-3-1b-it-q4_k_m.gguf --system "Answer in one sentence."
    """
    loaded = load_settings(given)
    from hetero.commands import generate as command

    sys.exit(command.chat(loaded.settings, command.Choices(max_tokens, temperature, seed), system))


@main.command()
@json_option
def devices(as_json: bool) -> None:
    """List the devices that can compute, by the names that --device takes.

    \b
    Example:
      hetero devices --json
    """
    from hetero.commands import inspect as command

    sys.exit(command.devices(as_json))


@main.command()
@model_argument
@settings_options(*ENGINE, "max_num_seqs")
@json_option
def plan(as_json: bool, **given: Any) -> None:
    """Show what of MODEL would sit where, without loading it. Exit code 1 when it does not fit.

    \b
    Example:
      hetero plan model.gguf --kv-memory 2GiB --json
    """
    loaded = load_settings(given)
    from hetero.commands import inspect as command

    sys.exit(command.plan(loaded.settings, as_json))


@main.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check this installation: Python, ggml, devices, compiled kernels, the default model.

    \b
    Example:
      hetero doctor --json > report.json
    """
    from hetero.commands import inspect as command

    sys.exit(command.doctor(as_json))


if __name__ == "__main__":
    main(prog_name="hetero")
