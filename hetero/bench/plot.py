"""Pictures of a sweep: latency against load, and the curve of what can be had for what."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hetero.bench.experiment import Result, median_of
from hetero.bench.results import Summary

FORMATS = (".png", ".svg", ".html")


class PlotError(Exception):
    """The picture cannot be made: one line."""


def check_plot(path: Path) -> None:
    """Before anything is measured: whether `plot` can write this file. Raises PlotError."""
    if path.suffix.lower() not in FORMATS:
        raise PlotError(f"--plot {path}: must end with one of {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise PlotError(f"--plot {path}: there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        if getattr(sys, "frozen", False):
            raise PlotError(
                "--plot needs matplotlib, which this executable does not have inside; "
                'draw with a hetero of pip install "hetero[plot]"'
            ) from None
        raise PlotError('--plot needs matplotlib: pip install "hetero[plot]"') from None


def plot(path: Path, title: str, results: Sequence[Result]) -> None:
    """Three panels: TTFT and TPOT (median, and p95) against load, and tokens per second against TTFT p95."""
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    kind = path.suffix.lower()
    (FigureCanvasAgg if kind == ".png" else FigureCanvasSVG)(figure)
    panels = figure.subplots(1, 3)
    figure.suptitle(title)
    for server in dict.fromkeys(r.server for r in results):
        _draw(panels, results, server)
    for panel, name in zip(panels, ("TTFT, ms", "TPOT, ms", "output tokens/s"), strict=True):
        panel.set_ylabel(name)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    if kind == ".html":
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg")
        svg = buffer.getvalue()[buffer.getvalue().index("<svg") :]
        path.write_text(
            f'<!doctype html><meta charset="utf-8"><title>{_escaped(title)}</title>{svg}', "utf-8"
        )
    else:
        figure.savefig(path, dpi=110)


def _draw(panels: Sequence, results: Sequence[Result], server: str) -> None:
    loads = list(dict.fromkeys(r.load for r in results))
    x = [load.concurrency or load.rate or 0 for load in loads]

    def series(value) -> list[float]:
        return [median_of(results, server, load, value) for load in loads]

    for panel, name in zip(panels, ("ttft", "tpot"), strict=False):
        for which, style in (("p50", "-o"), ("p95", "--o")):
            values = [1e3 * v for v in series(lambda s, n=name, w=which: _of(s, n, w))]
            panel.plot(x, values, style, label=f"{server} {which}", markersize=4)
        panel.set_xlabel("clients" if loads[0].concurrency else "requests a second")
    latency, rate = series(lambda s: _of(s, "ttft", "p95")), series(lambda s: s.output_rate)
    panels[2].plot([1e3 * v for v in latency], rate, "-o", label=server, markersize=4)
    for load, a, b in zip(x, latency, rate, strict=True):
        panels[2].annotate(f"{load:g}", (1e3 * a, b), fontsize="x-small")
    panels[2].set_xlabel("TTFT p95, ms (each point a load)")


def _of(summary: Summary, name: str, which: str) -> float | None:
    return getattr(summary, name).get(which)


def _escaped(text: str) -> str:
    import html

    return html.escape(text)
