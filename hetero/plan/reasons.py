"""Why a split is as it is: what one layer more or less would do at each cut, and who was left out."""

from __future__ import annotations

from collections.abc import Sequence

from hetero.plan.problem import SplitProblem
from hetero.plan.split import Part, Split, overfull, rate, stage_seconds
from hetero.sizes import format_size


def cut_reasons(
    problem: SplitProblem, parts: Sequence[Part], tokens: int, labels: Sequence[str], given: bool
) -> list[str]:
    """One line for each stage: why it ends where it does. `given`: the user said so."""
    if given:
        return ["as --split says"] * len(parts)
    if len(parts) == 1:
        return ["all layers"]
    return [_cut(problem, parts, i, tokens, labels) for i in range(len(parts) - 1)] + [_rest(problem, parts)]


def left_out(problem: SplitProblem, parts: Sequence[Part], tokens: int, labels: Sequence[str]) -> list[str]:
    """One line for each device without layers."""
    used = {part.device for part in parts}
    costs, memory = problem.costs(problem.goal), problem.memory(tokens)
    now = rate(parts, costs, problem.goal)
    lines = []
    for device, label in enumerate(labels):
        if device in used:
            continue
        trials = [rate(p, costs, problem.goal) for p in _with(parts, device) if not overfull(p, memory)]
        best = min(trials, key=lambda split: split.score, default=None)
        if best is None:
            lines.append(f"{label} is left out: it has no memory for a layer")
        else:
            lines.append(f"{label} is left out: with a layer on it, {_compared(now, best, problem)}")
    return lines


def _with(parts: Sequence[Part], device: int) -> list[tuple[Part, ...]]:
    """The splits in which `device` takes one layer off an end of a stage of several."""
    found = []
    for i, part in enumerate(parts):
        if part.last - part.first < 2:
            continue
        cut = part.last - 1
        after = (Part(part.device, part.first, cut), Part(device, cut, part.last))
        before = (Part(device, part.first, part.first + 1), Part(part.device, part.first + 1, part.last))
        found += [(*parts[:i], *pair, *parts[i + 1 :]) for pair in (before, after)]
    return found


def _cut(problem: SplitProblem, parts: Sequence[Part], index: int, tokens: int, labels: Sequence[str]) -> str:
    """What keeps the end of stage `index` from moving by a layer: memory, where speed wants it, or speed."""
    costs, memory = problem.costs(problem.goal), problem.memory(tokens)
    now, already = rate(parts, costs, problem.goal), overfull(parts, memory)
    slower, full = [], []
    for step in (1, -1):
        moved = _moved(parts, index, step)
        if moved is None:
            continue
        label, other = (
            labels[parts[index if step > 0 else index + 1].device],
            rate(moved, costs, problem.goal),
        )
        missing = [n for pool, n in overfull(moved, memory).items() if n > already.get(pool, 0)]
        if missing:
            full.append(
                (other.score < now.score, f"{label} lacks {format_size(max(missing))} for another layer")
            )
        elif other.score >= now.score:
            slower.append((other.score, f"with another layer on {label}, {_compared(now, other, problem)}"))
    wanted = [text for faster, text in full if faster]
    texts = wanted or [text for _, text in sorted(slower)] or [text for _, text in full]
    return texts[0] if texts else "each of the two stages must have a layer"


def _moved(parts: Sequence[Part], index: int, step: int) -> tuple[Part, ...] | None:
    left, right = parts[index], parts[index + 1]
    cut = left.last + step
    if not left.first < cut < right.last:
        return None
    pair = (Part(left.device, left.first, cut), Part(right.device, cut, right.last))
    return (*parts[:index], *pair, *parts[index + 2 :])


def _compared(now: Split, other: Split, problem: SplitProblem) -> str:
    """In the figure that decides: the slowest stage, else the sum over all stages."""
    if problem.objective != "latency" and other.slowest > now.slowest:
        text = f"the slowest stage would take {_ms(other.slowest)} ms instead of {_ms(now.slowest)}"
    elif other.total > now.total:
        text = f"a token would take {_ms(other.total)} ms through all stages instead of {_ms(now.total)}"
    else:
        text = f"a token would cost {_ms(other.score)} ms instead of {_ms(now.score)}"
    return f"{text}, with its share of prompts"  # what no step in the table has


def _rest(problem: SplitProblem, parts: Sequence[Part]) -> str:
    costs, end = problem.costs(problem.goal)(len(parts)), parts[-1]
    head = float(costs.last[end.device])
    layer = stage_seconds(parts, costs)[-1] - head
    layers = head / max(layer / (end.last - end.first), 1e-12)
    if layers < 0.5:
        return "the rest"
    return f"the rest; the output head costs as much as {layers:.1f} layers here"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


__all__ = ["cut_reasons", "left_out"]
