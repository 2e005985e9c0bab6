"""A benchmark's results for people: a Markdown table, one row for each server and load."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hetero.bench.experiment import Plan, Result, median_of, ratios, saturation
from hetero.bench.load import Load
from hetero.bench.results import Summary
from hetero.bench.server_info import ServerInfo, describe

Value = Callable[[Summary], float | None]


def _percentile(name: str, which: str) -> Value:
    return lambda summary: getattr(summary, name).get(which)


COLUMNS: tuple[tuple[str, Value, float, str], ...] = (  # title, value, scale, format
    ("answered", lambda s: s.answered, 1, ".0f"),
    ("failed", lambda s: s.failed, 1, ".0f"),
    ("req/s", lambda s: s.request_rate, 1, ".2f"),
    ("output tok/s", lambda s: s.output_rate, 1, ".0f"),
    ("TTFT p50 ms", _percentile("ttft", "p50"), 1e3, ".0f"),
    ("p95", _percentile("ttft", "p95"), 1e3, ".0f"),
    ("p99", _percentile("ttft", "p99"), 1e3, ".0f"),
    ("TPOT p50 ms", _percentile("tpot", "p50"), 1e3, ".1f"),
    ("p95", _percentile("tpot", "p95"), 1e3, ".1f"),
    ("gap p99 ms", _percentile("gap", "p99"), 1e3, ".1f"),
    ("e2e p50 s", _percentile("e2e", "p50"), 1, ".2f"),
    ("p95", _percentile("e2e", "p95"), 1, ".2f"),
    ("queue p95 ms", _percentile("queue", "p95"), 1e3, ".0f"),
    ("cached", lambda s: s.cached, 1, ".0%"),
    ("goodput/s", lambda s: s.goodput, 1, ".2f"),
    ("good", lambda s: s.good, 1, ".0%"),
)
RATIOS: tuple[tuple[str, Value], ...] = (
    ("output tok/s", lambda s: s.output_rate),
    ("TTFT p50", _percentile("ttft", "p50")),
    ("TTFT p95", _percentile("ttft", "p95")),
    ("TPOT p50", _percentile("tpot", "p50")),
    ("goodput", lambda s: s.goodput),
)


def markdown(plan: Plan, measured: Sequence[ServerInfo], results: Sequence[Result]) -> str:
    """The table, the ratios between servers, where a sweep saturates, and all that went wrong."""
    servers = list(dict.fromkeys(r.server for r in results))
    loads = list(dict.fromkeys(r.load for r in results))
    lines = [f"**{plan.workload.name}**: {plan.workload.title}; seed {plan.seed}"]
    if plan.limits:
        lines.append(f"A good answer keeps {plan.limits}.")
    lines += [f"- {line}" for info in measured if (line := describe(info)) is not None]
    lines += ["", *_table(results, servers, loads), ""]
    lines += _failures(results)
    if len(servers) > 1:
        lines += [*_comparison(results, servers, loads), ""]
    if len(loads) > 1:
        for server in servers:
            found = saturation(results, server)
            lines.append(
                f"{server} is saturated at {found}: more load brings hardly more tokens per second."
                if found
                else f"{server} is not saturated: its tokens per second still grow at {loads[-1]}."
            )
        lines.append("")
    late = max(r.summary.late for r in results)
    if late > 0.05:
        lines += [f"Requests were sent up to {1e3 * late:.0f} ms late: this client could not keep up.", ""]
    return "\n".join(lines)


def _table(results: Sequence[Result], servers: Sequence[str], loads: Sequence[Load]) -> list[str]:
    rows = [
        [median_of(results, s, load, value) for _, value, _, _ in COLUMNS] for load in loads for s in servers
    ]
    used = [i for i in range(len(COLUMNS)) if any(not math.isnan(row[i]) for row in rows)]
    head = ["server", "load", *(COLUMNS[i][0] for i in used)]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * len(used)]
    names = [(server, str(load)) for load in loads for server in servers]
    for (server, load), row in zip(names, rows, strict=True):
        cells = [_cell(row[i], *COLUMNS[i][2:]) for i in used]
        lines.append("| " + " | ".join([server, load, *cells]) + " |")
    return lines


def _cell(value: float, scale: float, spec: str) -> str:
    return "-" if math.isnan(value) else format(scale * value, spec)


def _failures(results: Sequence[Result]) -> list[str]:
    lines = []
    for r in results:
        for cause, number in r.summary.errors.items():
            lines.append(f"- {r.server}, {r.load}, run {r.repetition + 1}: {number} failed: {cause}")
    if lines:
        return ["**Not every request was answered; the numbers are of those that were:**", "", *lines, ""]
    return []


def _comparison(results: Sequence[Result], servers: Sequence[str], loads: Sequence[Load]) -> list[str]:
    base = servers[-1]
    lines = [f"Against {base}, median of the runs (least to greatest):", ""]
    lines += ["| server | load | " + " | ".join(title for title, _ in RATIOS) + " |"]
    lines += ["|---|---|" + "---:|" * len(RATIOS)]
    for load in loads:
        for server in servers[:-1]:
            cells = []
            for _, value in RATIOS:
                found = ratios(results, server, base, load, value)
                cells.append("-" if found is None else "{:.2f}x ({:.2f} to {:.2f})".format(*found))
            lines.append("| " + " | ".join([server, str(load), *cells]) + " |")
    return lines
