"""Command line of hetero. Click only: everything that computes is imported inside the commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from hetero import __version__
from hetero.commands.bench_cli import bench
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
from hetero.kv_types import parse_several
from hetero.settings import LOG_LEVELS
from hetero.sizes import parse_size


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
@click.argument("reference", metavar="REF")
@click.argument("other", metavar="OTHER", required=False)
@click.option(
    "--kv-type",
    metavar="TYPE,TYPE",
    help="In place of OTHER: REF itself with its KV cache in these formats, against f16.",
)
@click.option(
    "--text", type=click.Path(path_type=Path), metavar="FILE", help="Text to read. Default: a packaged one."
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=8192,
    show_default=True,
    help="Read this much of the text.",
)
@click.option(
    "--ctx",
    type=click.IntRange(min=8),
    default=512,
    show_default=True,
    help="Tokens in a window.",
)
@click.option(
    "--max-kl", type=click.FloatRange(min=0), metavar="NATS", help="Fail above this mean KL divergence."
)
@click.option(
    "--max-ppl-ratio",
    type=click.FloatRange(min=0),
    metavar="R",
    help="Fail above OTHER's perplexity / REF's.",
)
@click.option(
    "--min-top1",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Fail below this share (0 to 1) of positions with the same likeliest token.",
)
@settings_options("device", "threads")
@json_option
def quality(
    reference: str,
    other: str | None,
    kv_type: str | None,
    text: Path | None,
    tokens: int,
    ctx: int,
    max_kl: float | None,
    max_ppl_ratio: float | None,
    min_top1: float | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Measure how far the predictions of the model OTHER are from those of REF.

    Both read the same text in windows of --ctx tokens; the second half of each window is scored.
    Exit code 1 when a limit is broken.

    \b
    Example:
      hetero quality f16.gguf q5_k_m.gguf --max-kl 0.02 --min-top1 0.93
      hetero quality model.gguf --kv-type fp8,q8_0 --ctx 4096
    """
    if (other is None) == (kv_type is None):
        raise click.UsageError("give OTHER, or --kv-type")
    if tokens < ctx:
        raise click.UsageError(f"--tokens {tokens} is less than one window of --ctx {ctx}")
    loaded = load_settings(given)
    from hetero.commands import quality as command

    bounds = command.Bounds(max_kl, max_ppl_ratio, min_top1)
    if other is not None:
        wanted = command.Comparand(reference, other, text, tokens, ctx)
        sys.exit(command.quality(loaded.settings, wanted, bounds, as_json))
    from hetero.commands import quality_kv

    try:
        kinds = tuple(parse_several(kv_type or ""))
    except ValueError as exc:
        raise click.UsageError(f"--kv-type: {exc}") from None
    formats = quality_kv.Formats(reference, kinds, text, tokens, ctx)
    sys.exit(quality_kv.quality(loaded.settings, formats, bounds, as_json))


@main.command()
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT", required=False, type=click.Path(path_type=Path))
@click.argument("type_argument", metavar="TYPE", required=False)
@click.option("--type", "type_option", metavar="TYPE", help="Q5_K_M, Q6_K, Q8_0, Q4_K_M, …, as TYPE.")
@click.option("--dry-run", is_flag=True, help="Only show size and bits per weight of each tensor.")
@click.option(
    "--imatrix", type=click.Path(path_type=Path), help="Importance matrix (GGUF): which columns matter more."
)
@click.option(
    "--tensor-type", multiple=True, metavar="REGEX=TYPE", help="Another type for the tensors it finds."
)
@click.option("--allow-requantize", is_flag=True, help="Take a file that is quantized already.")
@click.option("--strict", is_flag=True, help="Fail when a tensor cannot have the type asked for.")
@click.option("--threads", type=click.IntRange(min=1, max=1024), help="Default: one for each core.")
@click.option("--force", is_flag=True, help="Replace OUT.")
@json_option
def quantize(
    source: str, target: Path | None, type_argument: str | None, type_option: str | None, **options: Any
):
    """Write a smaller copy of the model IN to OUT, with the weights in TYPE.

    \b
    Example:
      hetero quantize model-f16.gguf model-q5_k_m.gguf --type Q5_K_M
      hetero quantize model-f16.gguf --type Q6_K --dry-run
    """
    if (type_argument is None) == (type_option is None):
        raise click.UsageError("give the type once: as TYPE or with --type")
    if target is None and not options["dry_run"]:
        raise click.UsageError("give OUT, or --dry-run")
    from hetero.commands import quantize as command

    options["tensor_types"] = options.pop("tensor_type")
    name = (type_option or type_argument or "").upper()
    sys.exit(command.quantize(command.Request(source, target, name, **options)))


@main.command()
@click.argument("model")
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    metavar="FILE",
    required=True,
    help="Text that is typical of use.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=32768,
    show_default=True,
    help="Read this much of the text.",
)
@click.option("--ctx", type=click.IntRange(min=8), default=512, show_default=True, help="Tokens in a window.")
@click.option("--force", is_flag=True, help="Replace OUT.")
@settings_options("device", "threads")
def imatrix(model: str, target: Path, text: Path, tokens: int, ctx: int, force: bool, **given: Any) -> None:
    """Measure which columns of MODEL's matrices matter on a text, for quantize --imatrix.

    Take another text than the one that quality is measured on.

    \b
    Example:
      hetero imatrix model-f16.gguf model.imatrix.gguf --text manuals.txt
    """
    if tokens < ctx:
        raise click.UsageError(f"--tokens {tokens} is less than one window of --ctx {ctx}")
    loaded = load_settings(given)
    from hetero.commands import imatrix as command

    sys.exit(command.imatrix(loaded.settings, model, target, text, tokens, ctx, force))


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


main.add_command(bench)
main.add_command(models)
main.add_command(pull)
main.add_command(tune)


if __name__ == "__main__":
    main(prog_name="hetero")
