"""What the user sees while a model loads and once it serves. On a terminal with rich, else plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from hetero.sizes import format_size

# (what is happening, how much of the whole is done: 0 to 1)
ProgressCallback = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Placement:
    """One row of "what sits where". Sizes in bytes; `threads` of this machine's CPU, else 0."""

    device: str
    what: str
    weights: int
    kv: int
    compute: int
    threads: int = 0

    @property
    def title(self) -> str:
        return device_title(self.device, self.threads)


@dataclass(frozen=True, slots=True)
class StartScreen:
    """The facts of a started server, ready to print."""

    model: str
    family: str
    n_params: int
    size_bytes: int
    quantization: str
    max_model_len: int
    kv_tokens: int
    ram_tokens: int
    max_num_seqs: int
    placements: tuple[Placement, ...]
    url: str
    start_seconds: float
    needs_key: bool
    open_to_network: bool
    url_elsewhere: str = ""  # for other machines, where that is not `url`
    notes: tuple[str, ...] = ()

    @property
    def model_line(self) -> str:
        size = (
            f"{format_count(self.n_params)} parameters, {self.quantization}, {format_size(self.size_bytes)}"
        )
        return f"{self.model}  ({self.family}, {size})"

    @property
    def capacity_line(self) -> str:
        full = self.kv_tokens // self.max_model_len
        fits = f"{full} full-length request{'s' if full != 1 else ''}"
        return (
            f"{self.kv_tokens:,} tokens of KV cache ({fits}; up to {self.max_num_seqs} at a time), "
            + (f"{self.ram_tokens:,} in the RAM cache, " if self.ram_tokens else "")
            + f"context {self.max_model_len:,}"
        )

    @property
    def warnings(self) -> list[str]:
        lines = list(self.notes)
        if self.open_to_network and not self.needs_key:
            lines.append("reachable from other machines without a key; set --api-key")
        return lines

    @property
    def editor_lines(self) -> list[tuple[str, str]]:
        """(label, value) to paste into an editor or any OpenAI-compatible client."""
        key = "one of your API keys" if self.needs_key else "anything, such as x"
        elsewhere = [("elsewhere", f"{self.url_elsewhere}/v1")] if self.url_elsewhere else []
        return [("base URL", f"{self.url}/v1"), *elsewhere, ("model", self.model), ("API key", key)]

    @property
    def curl(self) -> str:
        header = " -H 'Authorization: Bearer KEY'" if self.needs_key else ""
        body = '{"messages":[{"role":"user","content":"Hello"}]}'
        return f"curl {self.url}/v1/chat/completions{header} -H 'Content-Type: application/json' -d '{body}'"


def device_title(name: str, threads: int) -> str:
    """A device as tables name it: with its threads, where its name does not say them already."""
    if not threads or ":threads=" in name:
        return name
    return f"{name} ({threads} thread{'' if threads == 1 else 's'})"


def format_count(number: int) -> str:
    """134515008 -> '135M'."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return str(number)


def show_start(start: StartScreen, stream: TextIO | None = None) -> None:
    """Print the start screen to `stream`, standard output by default."""
    stream = stream or sys.stdout
    if stream.isatty():
        _show_rich(start, stream)
        return
    lines = [f"model: {start.model_line}", f"capacity: {start.capacity_line}"]
    for place in start.placements:
        lines.append(
            f"{place.title}: {place.what}; weights {format_size(place.weights)}, "
            f"KV {format_size(place.kv)}, compute {format_size(place.compute)}"
        )
    lines += [f"warning: {line}" for line in start.warnings]
    lines += [f"{label}: {value}" for label, value in start.editor_lines]
    lines += [f"try: {start.curl}", f"ready after {start.start_seconds:.1f} s: {start.url}"]
    print("\n".join(lines), file=stream, flush=True)


def _show_rich(start: StartScreen, stream: TextIO) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(file=stream, highlight=False)
    console.print(f"\n[bold]{escape(start.model_line)}[/]")
    console.print(f"{start.capacity_line}\n")
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column, justify in (
        ("device", "left"),
        ("what", "left"),
        ("weights", "right"),
        ("KV cache", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    table.add_column("compute", justify="right")
    for place in start.placements:
        sizes = (format_size(n) for n in (place.weights, place.kv, place.compute))
        table.add_row(place.title, place.what, *sizes)
    console.print(table)
    for line in start.warnings:
        console.print(f"\n[yellow]{escape(line)}[/]")
    console.print("\n[dim]In your editor (OpenAI-compatible):[/]")
    for label, value in start.editor_lines:
        console.print(f"  {label:9} [cyan]{escape(value)}[/]", soft_wrap=True)
    console.print("[dim]Or:[/]")
    console.print(f"  {escape(start.curl)}", soft_wrap=True)
    console.print(
        f"\n[green]Ready[/] after {start.start_seconds:.1f} s: [bold]{start.url}[/]   Ctrl-C stops.\n"
    )


@contextmanager
def loading(stream: TextIO | None = None) -> Iterator[ProgressCallback]:
    """A progress bar on a terminal, else one line for each phase; on standard error by default."""
    stream = stream or sys.stderr
    if not stream.isatty():
        with _plain_progress(stream) as update:
            yield update
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("starting", total=1.0)

        def show(text: str, done: float) -> None:
            bar.update(task, description=text, completed=done)

        yield show


@contextmanager
def _plain_progress(stream: TextIO) -> Iterator[ProgressCallback]:
    started = time.monotonic()
    last = ""

    def show(text: str, done: float) -> None:
        nonlocal last
        if text != last:
            print(f"[{time.monotonic() - started:5.1f} s] {text}", file=stream, flush=True)
            last = text

    yield show


@contextmanager
def showing_compilation(progress: ProgressCallback) -> Iterator[ProgressCallback]:
    """Hands phases on, and says so whenever numba compiles instead of loading what it compiled before."""
    from numba.core import event

    done = 0.0

    def show(text: str, fraction: float) -> None:
        nonlocal done
        done = fraction
        progress(text, fraction)

    class Compiling(event.Listener):
        def on_start(self, event: object) -> None:
            progress("compiling kernels for this CPU (first start only)", done)

        def on_end(self, event: object) -> None:
            pass

    with event.install_listener("numba:run_pass", Compiling()):
        yield show
