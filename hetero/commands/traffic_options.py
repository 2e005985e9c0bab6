"""What `hetero bench` and `hetero tune` both ask: which traffic, how it arrives, what a good answer keeps."""

from __future__ import annotations

from collections.abc import Callable

import click


def traffic_options(clients: str) -> Callable[[Callable], Callable]:
    """Options workload, rate, burstiness, concurrency, prompt_tokens, output_tokens and slo.

    `clients` says how many there are where neither a rate nor a number is given.
    """
    options = (
        click.option(
            "-w", "--workload", default="chat", show_default=True, metavar="NAME|FILE",
            help="chat, shared-prefix, long-prompt, code-edit, agent, or a JSONL file of requests.",
        ),
        click.option(
            "--rate", type=click.FloatRange(0.001, 1e5), metavar="R", help="Open loop: sessions a second."
        ),
        click.option(
            "--burstiness", type=click.FloatRange(0, 10),
            help="Of the arrivals at a rate: 0 a steady beat, 1 Poisson (the default), more in bursts.",
        ),
        click.option(
            "-c", "--concurrency", type=click.IntRange(1, 4096), metavar="N",
            help=f"Closed loop: N clients at a time. Default: {clients}.",
        ),
        click.option(
            "--prompt-tokens", metavar="LENGTH",
            help="200, 50..400 or lognormal(200,0.8), in place of the workload's.",
        ),
        click.option("--output-tokens", metavar="LENGTH", help="The same for answers."),
        click.option(
            "--slo", metavar="LIMITS", help="What a good answer keeps: ttft=600ms,tpot=50ms,e2e=20s."
        ),
    )  # fmt: skip

    def decorate(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
