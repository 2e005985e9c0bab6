"""`hetero tune`: which settings are best for a workload under limits, measured one trial after the other.

<folder>/tune.json     what is searched, with what, on which machine; must be the same to go on
<folder>/trials.jsonl  a line for each trial that has ended
<folder>/NNN.log       what a trial's server said
<folder>/hetero.toml   the winner
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hetero.bench.own_server import StartError, measure_kl
from hetero.bench.search import Choice, Lever, Search
from hetero.bench.server_info import this_machine
from hetero.bench.trial import Outcome, Traffic, run_trial
from hetero.files import write_whole

KL_TOKENS, KL_CTX = 4096, 1024
SEARCH_SEED = "tune"
HELD_OUT = "held out"
CONFIRMATIONS = 5
WORSE = 1  # so many of them may show the opposite
SHORT = 1e-6  # of its score counts of a trial that is short of the limits
CLOSE = 0.05  # a best that is no more than so much better: the settings are as good as they get

Show = Callable[[str, int, int], None]


class TuneError(Exception):
    """Tuning cannot begin or go on: one line."""


@dataclass(slots=True)
class Tuning:
    """A search with its record. `given`: the settings from the command line, which every trial has.

    `max_kl`: mean KL divergence in nats that a format of the KV cache may have against f16; None: answers
    may not change at all.
    """

    given: Mapping[str, Any]
    model: str
    levers: Sequence[Lever]
    traffic: Traffic
    max_kl: float | None
    folder: Path
    outcomes: list[Outcome] = field(default_factory=list)
    kl: dict[str, float | str] = field(default_factory=dict)  # or why it could not be measured

    def open(self, model_digest: str) -> None:
        """Make the folder, or go on with what is in it. Raises TuneError where that is of something else."""
        head = self._head(model_digest)
        path, trials = self.folder / "tune.json", self.folder / "trials.jsonl"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                write_whole(path, json.dumps(head, indent=1) + "\n")
                return
            before = json.loads(path.read_text(encoding="utf-8"))
            differing = [k for k in head if before.get(k) != head[k]]
            if differing:
                raise TuneError(f"{self.folder}: holds another search: {', '.join(differing)} differ")
            text = trials.read_text(encoding="utf-8") if trials.exists() else ""
            if text and not text.endswith("\n"):  # the last line was cut off; the next has one of its own
                with trials.open("a", encoding="utf-8") as file:
                    file.write("\n")
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or error
            raise TuneError(f"{self.folder}: {why}") from None
        for line in text.splitlines():
            try:
                found = json.loads(line)
            except ValueError:  # it was cut off
                continue
            if "kl" in found:
                self.kl[found["kv_type"]] = found["kl"]
            else:
                self.outcomes.append(Outcome.of(found))

    def _head(self, model_digest: str) -> dict[str, Any]:
        traffic = self.traffic
        return {
            "hetero_tune": 1,
            "machine": this_machine(),
            "model": model_digest,
            "given": {
                k: list(v) if isinstance(v, tuple) else v for k, v in self.given.items() if k != "api_key"
            },
            "levers": {lever.name: list(lever.values) for lever in self.levers},
            "workload": traffic.workload.name,
            "title": traffic.workload.title,
            "prompt_tokens": None if traffic.sizes.prompt is None else str(traffic.sizes.prompt),
            "output_tokens": None if traffic.sizes.output is None else str(traffic.sizes.output),
            "load": asdict(traffic.load),
            "limits": asdict(traffic.limits),
            "share": traffic.share,
            "sessions": traffic.sessions,
            "max_kl": self.max_kl,
        }

    # -- searching -----------------------------------------------------------------------------------

    def search(self, seconds: float, show: Show) -> Search:
        """Try settings, so long that a confirmation, too, ends within `seconds` as far as can be told.

        TuneError where the settings as they are cannot be measured.
        """
        deadline, last = time.monotonic() + seconds, 0.0
        search = self.known()
        for choice in search.steps():
            began = time.monotonic()
            if began + (1 + 2 * CONFIRMATIONS) * last >= deadline and () in search.scores:
                break
            outcome = self.trial(choice, SEARCH_SEED, show)
            if not choice and outcome.rejected:
                raise TuneError(f"the settings as they are: {outcome.rejected}")
            search.tell(choice, score_of(outcome))
            last = time.monotonic() - began  # the first takes longer where kernels had to be compiled
        return search

    def known(self) -> Search:
        """The search as far as it is recorded; a base that could not be measured is tried again."""
        search = Search(self.levers)
        for outcome in self.outcomes:
            if outcome.seed == SEARCH_SEED and (outcome.choice or not outcome.rejected):
                search.tell(outcome.choice, score_of(outcome))
        return search

    def trial(self, choice: Choice, seed: str, show: Show, traffic: Traffic | None = None) -> Outcome:
        """Measure one choice, and write down what came of it. `traffic`: in place of the search's."""
        name = f"{len(self.outcomes):03d}"
        reason = self._too_far(choice)
        if reason is not None:
            outcome = Outcome(choice, seed, reason)
        else:
            what = describe(choice)
            outcome = run_trial(
                self.given, choice, traffic or self.traffic, seed, self.folder, name, self._expected(choice),
                lambda done, total: show(what, done, total),
            )  # fmt: skip
        self.outcomes.append(outcome)
        self._append(outcome.as_dict())
        return outcome

    def _expected(self, choice: Choice) -> str | None:
        """The base's answers; none where the format of the KV cache differs, which max_kl judges."""
        if "kv_type" in dict(choice) or not choice:
            return None
        return next((o.answers for o in self.outcomes if not o.choice), None)

    def _too_far(self, choice: Choice) -> str | None:
        kv_type = dict(choice).get("kv_type")
        if kv_type is None or kv_type == "f16":
            return None
        if self.max_kl is None:
            return f"kv_type {kv_type} changes answers; --max-kl says how far it may"
        if kv_type not in self.kl:
            try:
                self.kl[kv_type] = measure_kl(self.model, self.given, kv_type, KL_TOKENS, KL_CTX)
            except StartError as error:
                self.kl[kv_type] = str(error)
            self._append({"kv_type": kv_type, "kl": self.kl[kv_type]})
        found = self.kl[kv_type]
        if isinstance(found, str):
            return f"the KL divergence of kv_type {kv_type} could not be measured: {found}"
        return f"KL divergence {found:.4f} of kv_type {kv_type}" if found > self.max_kl else None

    def _append(self, line: Mapping[str, Any]) -> None:
        with (self.folder / "trials.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    # -- confirming ----------------------------------------------------------------------------------

    def confirm(self, best: Choice, show: Show, seed: str = HELD_OUT) -> Confirmation:
        """The best against the base on traffic that was not searched with, in turn."""
        scores: dict[Choice, list[float]] = {(): [], best: []}
        rejected, short = [], {(): False, best: False}
        for number in range(CONFIRMATIONS):
            for choice in ((), best) if number % 2 == 0 else (best, ()):
                outcome = self.trial(choice, f"{seed}/{number}", show, self.traffic.other(number))
                if outcome.rejected and choice:
                    rejected.append(outcome.rejected)
                short[choice] = short[choice] or outcome.short
                scores[choice].append(outcome.score or 0.0)
        if short[best] and not short[()]:
            rejected.append("the limits were not kept, which the settings as they are did")
        pairs = list(zip(scores[best], scores[()], strict=True))
        found = [one / base for one, base in pairs if base > 0]
        return Confirmation(best, tuple(pairs), tuple(found), tuple(rejected))


@dataclass(frozen=True, slots=True)
class Confirmation:
    """`pairs` of (best, base) scores on held-out traffic, and their ratios where the base had any."""

    choice: Choice
    pairs: tuple[tuple[float, float], ...]
    ratios: tuple[float, ...]
    rejected: tuple[str, ...]

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def holds(self) -> bool:
        """Whether the best is better on other traffic, too: by more than CLOSE, or from nothing, and not by a
        few strokes of luck."""
        if self.rejected or not any(one > 0 for one, _ in self.pairs):
            return False
        worse = sum(one <= base for one, base in self.pairs if base > 0)
        return worse <= WORSE and (self.ratio is None or self.ratio > 1 + CLOSE)


def describe(choice: Choice) -> str:
    """A choice for people."""
    return ", ".join(f"{name}={value}" for name, value in choice) or "settings as they are"


def score_of(outcome: Outcome) -> float | None:
    """For the search: None is rejected. What is short of the limits comes behind all that keeps them."""
    if outcome.rejected or outcome.score is None:
        return None
    return SHORT * outcome.score if outcome.short else outcome.score


def winner_toml(given: Mapping[str, Any], choice: Choice) -> str:
    """hetero.toml with the given settings and the choice's; keys to the API are left out."""
    lines = ["# Written by `hetero tune`."]
    for name, value in {**given, **dict(choice)}.items():
        if name != "api_key":
            lines.append(f"{name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A TOML value: text that is a number stays text, which settings read alike."""
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(str(value), ensure_ascii=False)


__all__ = ["Confirmation", "TuneError", "Tuning", "describe", "score_of", "winner_toml"]
