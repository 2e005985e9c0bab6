"""Command line of hetero. Click only: everything that computes is imported inside the commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from hetero.commands.bench_cli import bench
from hetero.commands.files_cli import FILE_COMMANDS
from hetero.commands.group import Commands
from hetero.commands.library import models, pull
from hetero.commands.options import (
    ENGINE,
    SERVER,
    json_option,
    load_settings,
    model_argument,
    model_option,
    settings_options,
    temperature_option,
)
from hetero.commands.tune_cli import tune
from hetero.settings import LOG_LEVELS
from hetero.sizes import parse_size


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from hetero.plan.versions import version_lines

        click.echo("\n".join(version_lines()))
        context.exit()


def _show_licenses(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from hetero.inside import licenses

        texts = licenses() or {"hetero": "Apache-2.0; what it requires is installed with its own licences\n"}
        for name, text in texts.items():
            click.echo(f"==== {name}\n\n{text}")
        context.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version, the commit and what ggml was built with, and exit.",
)
@click.option(
    "--licenses",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_licenses,
    help="Show the licences of all that an executable has inside, and exit.",
)
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
@model_argument
@settings_options("device", "threads", "max_num_batched_tokens", "kv_type")
@click.option("--calibrate", is_flag=True, help="Time MODEL's layers on each device, for plans to come.")
@json_option
def devices(as_json: bool, calibrate: bool, **given: Any) -> None:
    """List the devices that can compute, by the names that --device takes.

    MODEL and the settings are for --calibrate.

    \b
    Example:
      hetero devices --json
      hetero devices --calibrate model.gguf
    """
    if not calibrate:
        if any(value is not None and value != () for value in given.values()):
            raise click.UsageError("MODEL and its settings only mean something with --calibrate")
        from hetero.commands import devices as command

        sys.exit(command.devices(as_json))
    loaded = load_settings(given)
    from hetero.commands import calibrate as calibration

    sys.exit(calibration.calibrate(loaded.settings, as_json))


@main.command()
@model_argument
@settings_options(*ENGINE, "max_num_seqs", "disk_cache", "spec", "spec_device")
@click.option(
    "--calibrate/--no-calibrate",
    default=None,
    help="Time the devices anew, or never. Default: several devices, where it was not done before.",
)
@json_option
def plan(as_json: bool, calibrate: bool | None, **given: Any) -> None:
    """Show what of MODEL would sit where, and how fast it would be. Exit code 1 when it does not fit.

    \b
    Example:
      hetero plan model.gguf --device CUDA0 --device CUDA1 --objective throughput
    """
    loaded = load_settings(given)
    from hetero.commands import plan as command

    sys.exit(command.plan(loaded.settings, as_json, calibrate))


@main.command()
@click.option("--kernels", is_flag=True, help="Measure our matmuls too: some seconds, more the first time.")
@json_option
def doctor(kernels: bool, as_json: bool) -> None:
    """Check this installation: Python, ggml, devices, kernels, the default model.

    \b
    Example:
      hetero doctor --json > report.json
    """
    from hetero.commands import inspect as command

    sys.exit(command.doctor(as_json, kernels))


@main.command()
@click.option(
    "--listen",
    metavar="ADDR:PORT",
    default="127.0.0.1:8090",
    show_default=True,
    help="Where to listen. Port 0 takes any that is free.",
)
@click.option("--trusted-network", is_flag=True, help="Let other machines in, though nothing is encrypted.")
@click.option(
    "--secret-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with the secret that servers must have too. Default: HETERO_WORKER_SECRET, else one that is "
    "made up and kept in the user's data folder.",
)
@click.option("--device", "devices", multiple=True, metavar="NAME", help="Device to offer. Default: all.")
@click.option(
    "--threads",
    type=click.IntRange(0, 4096),
    metavar="N",
    default=0,
    help="Threads of the CPU device. Default: one per available core.",
)
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where layers that servers have sent are kept. Default: in the user's cache folder.",
)
@click.option(
    "--cache-size",
    metavar="SIZE",
    default="64GiB",
    show_default=True,
    help="Most that is kept there; what was used longest ago goes first.",
)
@click.option(
    "--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True, help="What is logged."
)
@json_option
def worker(cache_size: str, **given: Any) -> None:
    """Serve this machine's devices to `hetero serve` on another one.

    There, name the worker with --device, and give it the same secret.

    \b
    Example:
      hetero worker --listen 192.168.1.20:8090 --trusted-network
      hetero serve model.gguf --device CUDA0 --device worker=192.168.1.20:8090
    """
    try:
        size = parse_size(cache_size)
    except ValueError as exc:
        raise click.UsageError(f"--cache-size: {cache_size!r} {exc}") from None
    from hetero.commands import worker as command

    sys.exit(command.worker(command.Options(cache_size=size, **given)))


def default_arguments() -> list[str] | None:
    """What an executable with contents does when it is started without arguments: serve them."""
    from hetero import inside

    contents = inside.contents()
    packaged = contents is not None and (contents.model is not None or contents.settings)
    return ["serve"] if packaged and len(sys.argv) == 1 else None


for command in (bench, models, pull, tune, *FILE_COMMANDS):
    main.add_command(command)

if __name__ == "__main__":
    import multiprocessing

    multiprocessing.freeze_support()  # an executable is started anew for each child
    main(default_arguments(), prog_name="hetero")
