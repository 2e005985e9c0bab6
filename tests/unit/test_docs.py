"""What README.md and docs/ tell a user to type exists, with these names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

import cli
from hetero.plan.models_docs import render_docs

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# A line of a block, fenced or indented, or a piece of text between backticks.
COMMAND = re.compile(r"^ {4}(?:\.venv/bin/)?(hetero .*)|`(?:\.venv/bin/)?(hetero [^`\n]+)`", re.MULTILINE)


def options(command: click.Command) -> set[str]:
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("page", PAGES)
def test_options_exist(page: str) -> None:
    known = set().union(*map(options, cli.main.commands.values()))
    known |= {"--version"}
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
