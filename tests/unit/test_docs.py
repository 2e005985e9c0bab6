"""What README.md and docs/ tell a user to type exists, with these names."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import click
import make_dashboard
import pytest

import cli
from hetero import metrics_docs
from hetero.plan.models_docs import render_docs

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
METRIC = re.compile(r"\bhetero_[a-z_]+\b")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# A line of a block, fenced or indented, or a piece of text between backticks.
COMMAND = re.compile(r"^ {4}(?:\.venv/bin/)?(hetero .*)|`(?:\.venv/bin/)?(hetero [^`\n]+)`", re.MULTILINE)


def options(command: click.Command) -> set[str]:
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("page", PAGES)
def test_options_exist(page: str) -> None:
    known = set().union(*map(options, cli.main.commands.values()))
    known |= {"--version"}
    if page == "docs/clients.md":
        known |= {"--oss", "--local-provider", "--model"}  # Codex's, Claude Code's and Aider's
    assert set(OPTION.findall((ROOT / page).read_text())) - known == set()


def test_command_lines_are_understood() -> None:
    found = [a or b for page in PAGES for a, b in COMMAND.findall((ROOT / page).read_text())]
    assert len(found) > 20
    for line in found:
        _, name, *words = shlex.split(line, comments=True)
        assert name in cli.main.commands, line
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used <= options(cli.main.commands[name]), line


def test_every_command_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert [name for name in cli.main.commands if f"| `hetero {name}" not in text] == []


def test_the_page_of_models_is_that_of_the_table() -> None:
    assert (ROOT / "docs/models.md").read_text() == render_docs(), "run `make docs`"


def test_the_page_of_metrics_is_what_they_say() -> None:
    assert (ROOT / "docs/metrics.md").read_text() == metrics_docs.render_docs(), "run `make docs`"


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    """And is what its script writes; docs/operating.md names only metrics that there are, too."""
    text = (ROOT / "docs/grafana/hetero.json").read_text()
    assert json.loads(text) == make_dashboard.dashboard(), "run `make docs`"
    known = {name for name, _, _, _ in metrics_docs.metrics()}
    histograms = {name for name, kind, _, _ in metrics_docs.metrics() if kind == "histogram"}
    known |= {f"{name}_bucket" for name in histograms}
    page = (ROOT / "docs/operating.md").read_text()
    for where, found in (("dashboard", METRIC.findall(text)), ("operating.md", METRIC.findall(page))):
        assert len(found) > 8 and set(found) - known == set(), where
    labels = {name: labels.split(", ") for name, _, labels, _ in metrics_docs.metrics()}
    for name, label in re.findall(r"sum by \((\w+)\) \(rate\((\w+?)[\[{]", text):
        assert name == "le" or name in labels[label]
