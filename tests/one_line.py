"""How a command fails."""

from __future__ import annotations

from click.testing import Result


def assert_one_line(result: Result, *words: str) -> None:
    """Exit code 1, and on stderr one line with these words."""
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("hetero: ") and result.stderr.count("\n") == 1, result.stderr
    assert [w for w in words if w not in result.stderr] == []
