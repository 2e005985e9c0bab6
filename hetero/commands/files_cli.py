"""The commands that make files of models: click only, as in cli.py, which adds them to the others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from hetero.commands.options import json_option, load_settings, settings_options
from hetero.kv_types import parse_several


@click.command()
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
        raise click.UsageError("give either OTHER or --kv-type")
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


@click.command()
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


@click.command()
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


@click.command()
@click.option("-m", "--model", help="Model to put inside: a path or a name. Default: none.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Settings to put inside, in place of the defaults.",
)
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", required=True, help="File to write.")
@click.option(
    "--base",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Executable to start from. Default: this one, or a new build of the checkout.",
)
@click.option("--force", is_flag=True, help="Replace FILE.")
def package(**given: Any) -> None:
    """Write one executable with settings and a model inside, which runs where no Python is.

    Without --model it takes the models that it is told of, as this program does.

    \b
    Example:
      hetero package --model model.gguf --config hetero.toml --out hetero-office
    """
    from hetero.commands import package as command

    sys.exit(command.package(command.Request(**given)))


FILE_COMMANDS = (quality, quantize, imatrix, package)
