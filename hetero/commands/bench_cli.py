"""The command line of `hetero bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from hetero.commands.options import json_option
from hetero.commands.traffic_options import traffic_options


@click.command()
@click.argument("urls", nargs=-1, metavar="[URL]...")
@click.option("-m", "--model", help="Model to ask for. Default: the first one that the server names.")
@traffic_options(clients="1, or as a recorded workload has it")
@click.option(
    "--sweep",
    metavar="WHAT=N,N,...",
    help="Several loads one after the other, to find where the server saturates: concurrency=1,2,4,8 or "
    "rate=0.5,1,2.",
)
@click.option(
    "-n", "--sessions", type=click.IntRange(1, 1_000_000), help="Sessions in each run. Default: 64."
)
@click.option(
    "--duration", type=click.FloatRange(0.1, 1e6), metavar="SECONDS", help="Begin no session after this time."
)
@click.option(
    "--warm-up", type=click.IntRange(0), default=2, show_default=True, help="Requests before it counts."
)
@click.option(
    "--repeat", type=click.IntRange(1, 100), default=1, show_default=True, help="Runs of each load."
)
@click.option(
    "--natural-end", is_flag=True, help="Let the model end its answers, instead of asking for a length."
)
@click.option(
    "--temperature", type=click.FloatRange(0, 2), default=0.0, show_default=True, help="Of all requests."
)
@click.option(
    "--endpoint", type=click.Choice(["chat", "completions"]), help="Default: chat if the model can."
)
@click.option("--api-key", envvar="HETERO_BENCH_API_KEY", help="Key to send.")
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed asks the same things.")
@click.option(
    "--record", type=click.Path(path_type=Path),
    help="Ask nothing: write down what others ask in --duration seconds, as a workload without text.",
)  # fmt: skip
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the whole record, as JSON.")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw latency against load: .png, .svg or .html."
)
@json_option
def bench(urls: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Measure a server, ours or any other that speaks the OpenAI API.

    Without a URL: http://127.0.0.1:8080. Several take turns with the same text and are compared with the
    last one. Exit code 1 when a request was not answered.

    \b
    Example:
      hetero bench --workload chat --rate 2 --slo ttft=600ms,tpot=50ms
      hetero bench --sweep concurrency=1,2,4,8,16 --plot load.html
      hetero bench http://127.0.0.1:8080 http://127.0.0.1:8081 --repeat 3
    """
    from hetero.commands import bench as command

    sys.exit(command.bench(urls or ("http://127.0.0.1:8080",), command.Options(**given), as_json))
