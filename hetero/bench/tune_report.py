"""What a search has found, for people: Markdown."""

from __future__ import annotations

from collections.abc import Container, Sequence

from hetero.bench.search import Choice, pareto
from hetero.bench.trial import Outcome, Traffic
from hetero.bench.tune import CLOSE, SEARCH_SEED, Confirmation, describe

FEW = 50  # answers


def markdown(traffic: Traffic, outcomes: Sequence[Outcome], confirmation: Confirmation | None) -> str:
    """The trials, which of them nothing beats in both score and TTFT, what was rejected, the confirmation."""
    unit = "good answers/s" if traffic.limits else "output tok/s"
    searched = [o for o in outcomes if o.seed == SEARCH_SEED]
    counted = [o for o in searched if o.rejected is None]
    lines = [f"**{traffic.workload.name}**, {traffic.load}; {len(searched)} trials"]
    if traffic.limits:
        lines.append(f"{traffic.share:.0%} of the answers must keep {traffic.limits}.")
    if counted and counted[0].answered < FEW:
        lines.append(
            f"A trial had about {counted[0].answered} answers, and scores of so few differ by chance: longer "
            "--seconds tell more."
        )
    if counted and all(o.short for o in counted):
        lines.append("No setting keeps that: what comes nearest is sought.")
    points = {o.choice: (o.score or 0.0, o.ttft_p95 or 0.0) for o in counted if not o.short}
    best = set(pareto(points))
    lines += [
        "",
        f"| settings | {unit} | TTFT p95 ms | TPOT p95 ms | output tok/s | |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for o in sorted(counted, key=lambda o: (o.short, -(o.score or 0.0))):
        cells = [f"{o.score:.2f}", _ms(o.ttft_p95, 0), _ms(o.tpot_p95, 1), f"{o.output_rate:.0f}"]
        lines.append(f"| {describe(o.choice)} | {' | '.join(cells)} | {_remark(o, best)} |")
    rejected = [o for o in outcomes if o.rejected is not None]
    if rejected:
        lines += ["", "Rejected:", ""]
        lines += [f"- {describe(o.choice)}: {o.rejected}" for o in rejected]
    lines += ["", *_verdict(len(searched), confirmation, unit), ""]
    return "\n".join(lines)


def _remark(outcome: Outcome, best: Container[Choice]) -> str:
    if outcome.short and outcome.good is not None:
        return f"only {outcome.good:.0%} kept the limits"
    return "Pareto" if outcome.choice in best else ""


def _verdict(trials: int, confirmation: Confirmation | None, unit: str) -> list[str]:
    if confirmation is None:
        if trials == 1:
            return ["There was no time for other settings and a confirmation; --minutes gives more."]
        return ["No other settings could be measured."]
    pairs = ", ".join(f"{one:.2f} against {base:.2f}" for one, base in confirmation.pairs)
    lines = [f"Best: **{describe(confirmation.choice)}**. On other such traffic, in turn: {pairs} {unit}."]
    lines += [f"Rejected there: {reason}." for reason in dict.fromkeys(confirmation.rejected)]
    ratio = confirmation.ratio
    if ratio is None:
        lines.append("The settings as they are kept the limits in no run.")
    elif confirmation.holds:
        lines.append(f"Confirmed: {ratio:.2f}x (median of {len(confirmation.ratios)}).")
    else:
        lines.append(_not_confirmed(ratio))
    return lines


def _not_confirmed(ratio: float) -> str:
    if ratio > 1 + CLOSE:
        return f"Not confirmed: {ratio:.2f}x in the median, but not often enough."
    return (
        f"Not confirmed ({ratio:.2f}x): the settings as they are come within {CLOSE:.0%} of the best found."
    )


def _ms(seconds: float | None, digits: int) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.{digits}f}"
