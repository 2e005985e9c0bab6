"""`hetero tune`: the walk over settings, what it rejects, and that it goes on where it was stopped."""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from echo_server import Echo, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from scale import FULL

import cli
from hetero.bench import own_server, trial, tune
from hetero.bench.distributions import Lengths
from hetero.bench.levers import LeverError, default_levers, parse_lever
from hetero.bench.load import Load, Run
from hetero.bench.results import Limits, Summary, summarize
from hetero.bench.search import NOISE, Choice, Lever, Search, pareto
from hetero.bench.trial import Outcome, Traffic
from hetero.bench.tune import Confirmation, TuneError, Tuning, winner_toml
from hetero.bench.tune_report import markdown
from hetero.bench.workload import WORKLOADS, Sizes
from hetero.commands import tune as command
from hetero.config import load
from hetero.settings import Settings

LEVERS = (Lever("max_num_seqs", ("4", "8")), Lever("spec", ("off", "ngram")), Lever("threads", ("1",)))
VALUES = [(lever.name, value) for lever in LEVERS for value in lever.values]


@given(
    st.dictionaries(st.sampled_from(VALUES), st.floats(0.3, 3.0)),
    st.sets(st.sampled_from(VALUES), max_size=2),
    st.integers(0, 12),
)
@settings(max_examples=200, deadline=None)
def test_search_finds_what_is_best(factors: dict, broken: set, known: int):
    """Where settings help independently of each other, the best of each lever; whatever was known before."""

    def score(choice: Choice) -> float | None:
        if any(pair in broken for pair in choice):
            return None
        product = 1.0
        for pair in choice:
            product *= factors.get(pair, 1.0)
        return product

    search, tried = Search(LEVERS), []
    for choice in search.steps():
        tried.append(choice)
        search.tell(choice, score(choice))
        search.check_invariants()
    assert tried[0] == () and len(set(tried)) == len(tried) <= 18
    best = score(search.best)
    assert best is not None
    for lever in LEVERS:
        for value in lever.values:
            other = score(tuple(sorted({**dict(search.best), lever.name: value}.items())))
            assert other is None or other <= NOISE**2 * best
    again = Search(LEVERS, {choice: score(choice) for choice in tried[:known]})
    for choice in again.steps():
        assert choice not in tried[:known]
        again.tell(choice, score(choice))
    assert again.best == search.best
    measured = [score(choice) or 0.0 for choice in tried if choice and score(choice) is not None]
    assert (search.contender is None) == (not measured)
    if search.contender is not None:
        assert search.contender == search.best or score(search.contender) == max(measured)


@given(st.dictionaries(st.integers(0, 30), st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_pareto(points: dict[int, tuple[float, float]]):
    kept = pareto(points)
    for name, (gain, cost) in points.items():
        beaten = any(g >= gain and c <= cost and (g, c) != (gain, cost) for g, c in points.values())
        assert (name in kept) != beaten


def traffic(**changed: Any) -> Traffic:
    sizes = Sizes(Lengths("fixed", 12), Lengths("fixed", 3))
    base = {"limits": Limits(), "share": 0.9, "sessions": 8, "load": Load(concurrency=2)}
    return Traffic(WORKLOADS["chat"], sizes, **{**base, **changed})


def behaving(monkeypatch: pytest.MonkeyPatch, how: Any) -> list[Mapping[str, Any]]:
    """Servers that behave as `how(settings)` says, in place of ours. The settings of all that started."""
    started: list[Mapping[str, Any]] = []

    @contextlib.contextmanager
    def fake(given: Mapping[str, Any], log: Path) -> Iterator[str]:
        started.append(given)
        echo = how(given)
        if isinstance(echo, str):
            raise own_server.StartError(echo)
        with serving(lambda: echo) as (url, _):
            yield url

    monkeypatch.setattr(trial, "serving", fake)
    monkeypatch.setattr(trial, "PROBES", 1)
    monkeypatch.setattr(tune, "CONFIRMATIONS", 1)
    return started


def new(folder: Path, levers: tuple[Lever, ...], max_kl: float | None = None, **changed: Any) -> Tuning:
    tuning = Tuning({"ctx": "512"}, "model.gguf", levers, traffic(**changed), max_kl, folder)
    tuning.open("abc")
    return tuning


def quiet(what: str, done: int, total: int) -> None:
    pass


def test_what_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    class Changed(Echo):
        async def _stream(self, request, tokens, how):
            return await super()._stream(request, tokens - (tokens > 3), how)

    def how(given: Mapping[str, Any]) -> Echo | str:
        kind = given.get("max_num_seqs", "")
        return {"1": "out of memory", "2": Echo(lambda n: "500" if n == 4 else "well"), "3": Changed()}.get(
            kind, Echo()
        )

    behaving(monkeypatch, how)
    tuning = new(tmp_path / "t", (Lever("max_num_seqs", ("1", "2", "3")), Lever("kv_type", ("fp8",))))
    assert tuning.search(60, quiet).best == ()
    reasons = {dict(o.choice).get("max_num_seqs", "base"): o.rejected for o in tuning.outcomes}
    assert reasons["1"] == "did not start: out of memory"
    assert reasons["2"] is not None and "1 of 8 failed" in reasons["2"] and "HTTP 500" in reasons["2"]
    assert reasons["3"] is not None and ("probe" in reasons["3"] or "changed" in reasons["3"])
    assert any("changes answers" in (o.rejected or "") for o in tuning.outcomes)
    text = markdown(tuning.traffic, tuning.outcomes, None)
    assert "out of memory" in text and "No other settings could be measured" in text


def test_changed_greedy_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    class Other(Echo):
        async def _stream(self, request, tokens, how):
            self.word = "v"
            return await super()._stream(request, tokens, how)

    behaving(monkeypatch, lambda given: Other() if "spec" in given else Echo())
    tuning = new(tmp_path / "t", (Lever("spec", ("off",)),))
    assert tuning.search(60, quiet).best == ()
    assert [o.rejected for o in tuning.outcomes] == [None, "greedy answers changed"]


def test_kv_types_are_judged_by_their_divergence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    behaving(monkeypatch, lambda given: Echo())
    found = {"q8_0": 0.001, "fp8": 0.5}
    monkeypatch.setattr(tune, "measure_kl", lambda model, given, kv_type, tokens, ctx: found[kv_type])
    tuning = new(tmp_path / "t", (Lever("kv_type", ("q8_0", "fp8")),), max_kl=0.02)
    tuning.search(60, quiet)
    assert [o.rejected for o in tuning.outcomes[:2]] == [None, None]
    assert tuning.outcomes[2].rejected == "KL divergence 0.5000 of kv_type fp8"
    again = new(tmp_path / "t", (Lever("kv_type", ("q8_0", "fp8")),), max_kl=0.02)
    assert again.kl == found


def test_a_search_finds_confirms_and_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The limit is kept only with max_num_seqs=2, whatever else this machine does; stopped after a trial."""
    started = behaving(monkeypatch, lambda given: Echo())

    def judged(run: Run, limits: Limits) -> Summary:
        kept = float(started[-1].get("max_num_seqs") == "2")
        return replace(summarize(run, limits), good=kept, goodput=8 * kept)

    monkeypatch.setattr(trial, "summarize", judged)
    levers = (Lever("max_num_seqs", ("1", "2")), Lever("spec", ("off",)))
    changed = {"limits": Limits(ttft=0.15), "sessions": 4}
    tuning = new(tmp_path / "t", levers, **changed)
    assert tuning.search(0, quiet).best == () and len(started) == 1  # the base, however short the time
    (tmp_path / "t" / "trials.jsonl").open("a").write('{"choice": {"cut')
    again = new(tmp_path / "t", levers, **changed)
    assert len(again.outcomes) == 1
    best = again.search(60, quiet).best
    assert best == (("max_num_seqs", "2"),)
    assert [s.get("max_num_seqs") for s in started[1:3]] == ["1", "2"], "the base was not measured again"
    assert new(tmp_path / "t", levers, **changed).outcomes == again.outcomes, "none was lost"
    confirmation = again.confirm(best, quiet)
    assert confirmation.rejected == () and confirmation.pairs[0][0] > 0
    assert "max_num_seqs=2" in markdown(again.traffic, again.outcomes, confirmation)
    with pytest.raises(TuneError, match="another search: levers differ"):
        new(tmp_path / "t", levers[:1], **changed)


def test_settings_as_good_as_any_are_shown_to_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Nothing is better: the best of the others is measured against them on other traffic all the same."""
    started = behaving(monkeypatch, lambda given: Echo())
    scores = {(None, None): 8.0, ("1", None): 4.0, (None, "off"): 7.9}

    def judged(run: Run, limits: Limits) -> Summary:
        settings = started[-1].get("max_num_seqs"), started[-1].get("spec")
        return replace(summarize(run, limits), good=1.0, goodput=scores[settings])

    monkeypatch.setattr(trial, "summarize", judged)
    levers = (Lever("max_num_seqs", ("1",)), Lever("spec", ("off",)))
    tuning = new(tmp_path / "t", levers, limits=Limits(ttft=9.0), sessions=4)
    search = tuning.search(60, quiet)
    assert search.best == () and search.contender == (("spec", "off"),)
    confirmation = tuning.confirm(search.contender, quiet)
    assert not confirmation.holds and confirmation.pairs == ((7.9, 8.0),)
    text = markdown(tuning.traffic, tuning.outcomes, confirmation)
    assert "Not confirmed (0.99x): the settings as they are come within 5% of the best found" in text
    assert (
        new(tmp_path / "t", levers, limits=Limits(ttft=9.0), sessions=4).known().contender == search.contender
    )


def test_the_time_is_kept_with_the_confirmation_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Trials of 10 seconds by a clock of its own: 140 seconds have room for three and a confirmation."""
    now = [0.0]
    monkeypatch.setattr(tune.time, "monotonic", lambda: now[0])

    def measured(given: Any, choice: Any, traffic: Any, seed: str, *rest: Any) -> Outcome:
        now[0] += 10
        return Outcome(choice, seed, None, answers="same", score=1.0, output_rate=1.0)

    monkeypatch.setattr(tune, "run_trial", measured)
    levers = (Lever("max_num_seqs", ("1", "2", "4", "8", "16", "64")),)
    tuning = new(tmp_path / "t", levers)
    search = tuning.search(140, quiet)
    assert len(tuning.outcomes) == 3 and search.contender is not None
    tuning.confirm(search.contender, quiet)
    assert now[0] == 30 + 2 * tune.CONFIRMATIONS * 10 <= 140
    short = new(tmp_path / "short", levers)
    assert short.search(60, quiet).contender is None
    assert "There was no time for other settings" in markdown(short.traffic, short.outcomes, None)


def test_recorded_traffic_is_tuned_as_it_came_and_proved_with_other_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The busiest second of a recording is searched with, the others confirm."""
    path = tmp_path / "load.jsonl"
    at = [0.1, 1.2, 1.3, 1.4, 2.5, 2.6]
    path.write_text("".join(f'{{"at": {t}, "prompt": "at {t}", "max_tokens": 3}}\n' for t in at))
    asked: list[list[str]] = []

    class Listening(Echo):
        def __init__(self) -> None:
            super().__init__()
            asked.append([])

        async def _stream(self, request, tokens, how):
            asked[-1].append(self.bodies[-1]["messages"][0]["content"])
            return await super()._stream(request, tokens, how)

    behaving(monkeypatch, lambda given: Listening())
    monkeypatch.setattr(tune, "CONFIRMATIONS", 2)
    found = command.Options(
        tmp_path, 1.0, str(path), None, None, None, 1.0, None, None, None, 0.95, None, (), False
    )
    traffic = command._traffic(found)
    tuning = Tuning({}, "model.gguf", (Lever("spec", ("off",)),), traffic, None, tmp_path / "t")
    tuning.open("id")
    best = tuning.search(60, quiet).contender
    assert best is not None
    tuning.confirm(best, quiet)
    assert len({texts[0] for texts in asked}) == 1 and not asked[0][0].startswith("at"), "the probe"
    busiest, next_busiest, quietest = ["at 1.2", "at 1.3", "at 1.4"], ["at 2.5", "at 2.6"], ["at 0.1"]
    assert [texts[1:] for texts in asked] == [busiest] * 2 + [next_busiest] * 2 + [quietest] * 2


def test_where_nothing_keeps_the_limits_the_nearest_is_sought(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Of two answers one keeps the limit with spec=off, else none; max_num_seqs=1 fails."""

    class Slow(Echo):
        SECONDS = 0.3

    class Half(Echo):
        @property
        def SECONDS(self) -> float:
            return 0.3 if len(self.bodies) % 2 else 0.0

    def how(given: Mapping[str, Any]) -> Echo | str:
        return "no memory" if "max_num_seqs" in given else Half() if "spec" in given else Slow()

    behaving(monkeypatch, how)
    load = Load(concurrency=1)
    levers = (Lever("spec", ("off",)), Lever("max_num_seqs", ("1",)))
    tuning = new(tmp_path / "t", levers, limits=Limits(ttft=0.15), sessions=4, load=load)
    best = tuning.search(60, quiet).best
    assert best == (("spec", "off"),)
    confirmation = tuning.confirm(best, quiet)
    assert confirmation.holds
    text = markdown(tuning.traffic, tuning.outcomes, confirmation)
    assert "No setting keeps that" in text and "kept the limits" in text and "no memory" in text


def test_what_holds():
    def found(*pairs: tuple[float, float], rejected: tuple[str, ...] = ()) -> bool:
        ratios = tuple(one / base for one, base in pairs if base)
        return Confirmation((("spec", "off"),), pairs, ratios, rejected).holds

    assert found((2.0, 1.0), (1.2, 1.0), (1.1, 1.0)) and not found((1.04, 1.0), (1.2, 1.0), (0.9, 1.0))
    assert not found((2.0, 1.0), (2.0, 1.0), (2.0, 1.0), (0.9, 1.0), (0.9, 1.0)), "luck"
    assert found((1.0, 0.0)) and not found((0.0, 0.0))
    assert not found((2.0, 1.0), rejected=("greedy answers changed",))


def test_the_winners_file_is_read_as_settings(tmp_path: Path):
    path = tmp_path / "hetero.toml"
    given = {"model": "a b.gguf", "device": ("CPU:threads=2", "CUDA0"), "api_key": ("secret",), "ctx": "4096"}
    path.write_text(winner_toml(given, (("kv_type", "k=q8_0,v=fp8"), ("max_num_seqs", "16"))))
    assert "secret" not in path.read_text()
    loaded = load({}, {}, path).settings
    assert loaded.device == given["device"] and loaded.max_num_seqs == 16 and loaded.ctx == 4096
    assert str(loaded.kv_type) == "k=q8_0,v=fp8" and loaded.model == "a b.gguf"
    assert tomllib.loads(path.read_text())["model"] == "a b.gguf"


def test_keys_are_not_on_the_command_line_of_a_trial():
    given = {"model": "m.gguf", "api_key": ("secret",), "device": ("CPU", "CUDA0")}
    assert own_server.flags(given) == ["m.gguf", "--device", "CPU", "--device", "CUDA0"]


def test_levers():
    for lever in default_levers(Settings(), 8, 2, True):
        assert lever.values and len(set(lever.values)) == len(lever.values)
        for value in lever.values:
            changed = load({lever.name: value}, {}).settings
            assert getattr(changed, lever.name) != getattr(Settings(), lever.name), lever
    assert "threads" not in [lever.name for lever in default_levers(Settings(), 0, 2, True)], "a GPU"
    names = [lever.name for lever in default_levers(Settings(), 1, 1, False)]
    assert "kv_type" not in names and "pipeline_depth" not in names and "threads" not in names
    assert parse_lever("max-num-seqs=8,16") == Lever("max_num_seqs", ("8", "16"))
    assert parse_lever("kv_type=k=q8_0,v=fp8;f16").values == ("k=q8_0,v=fp8", "f16")
    for wrong in ("max_num_seqs", "max_num_seqs=none", "colour=red", "port=1", "spec=maybe"):
        with pytest.raises(LeverError, match=r"max_num_seqs|max-num-seqs|colour|port|spec"):
            parse_lever(wrong)


def test_end_to_end(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Real servers: a search over one lever, its confirmation, its file, and that again from the record.

    The folder's hetero.toml asks for a key that the command line does not have.
    """
    monkeypatch.chdir(tmp_path)
    Path("hetero.toml").write_text('api_key = ["of the file"]\n', encoding="utf-8")
    monkeypatch.setattr(trial, "PROBES", 2)
    monkeypatch.setattr(tune, "CONFIRMATIONS", 1)
    monkeypatch.setattr("hetero.bench.search.NOISE", 0.0)  # any other setting wins
    monkeypatch.setattr(tune, "CLOSE", -1.0)
    folder = tmp_path / "found"
    arguments = ["tune", str(smollm2_path), "-o", str(folder), "--seconds", "1", "-c", "2", "--ctx", "1024"]
    arguments += ["--kv-tokens", "4096", "--threads", "2", "--prompt-tokens", "16", "--output-tokens", "8"]
    arguments += ["--lever", "max_num_seqs=4"]
    done = CliRunner().invoke(cli.main, arguments)
    assert done.exit_code == 0, done.output
    assert "max_num_seqs=4" in done.output and "settings as they are" in done.output
    assert tomllib.loads((folder / "hetero.toml").read_text())["max_num_seqs"] == "4"
    trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert len(trials) == 4 and all(t["score"] > 0 and t["rejected"] is None for t in trials)
    assert len({t["answers"] for t in trials}) == 1
    assert trials[1]["status"]["about"]["settings"]["max_num_seqs"] == 4
    if not FULL:  # two servers more
        return
    again = CliRunner().invoke(cli.main, [*arguments, "--replay"])
    assert again.exit_code == 0 and "Best: **max_num_seqs=4**" in again.output
    assert len((folder / "trials.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lever", "colour=red"], "'colour' is not a setting that can be tuned"),
        (["--burstiness", "2", "-c", "1"], "--burstiness is of arrivals at a rate"),
        (["--slo", "quick"], "--slo: 'quick' is not a limit"),
        (["--rate", "1", "-c", "1"], "--rate and --concurrency"),
        (["--replay"], "there is nothing to replay"),
    ],
)
def test_what_cannot_be_tuned_is_one_line(
    smollm2_path: Path, tmp_path: Path, arguments: list[str], said: str
):
    done = CliRunner().invoke(cli.main, ["tune", str(smollm2_path), "-o", str(tmp_path / "x"), *arguments])
    assert done.exit_code == 1 and said in done.stderr and len(done.stderr.strip().splitlines()) == 1
