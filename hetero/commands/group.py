"""What every command of hetero does about an output that does not take everything."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import Any

import click

FULL = {errno.ENOSPC, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC)}


class Commands(click.Group):
    """A disk that is full is one line and exit code 1; an output that was closed takes nothing; what the
    output's encoding has no letters for is a question mark."""

    def invoke(self, ctx: click.Context) -> Any:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # whoever started this has closed it
                setattr(sys, name, _nowhere())
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="replace")  # a model writes what no old code page has
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except OSError as exc:
            if exc.errno not in FULL:
                raise
            sys.stdout = _nowhere()  # else Python tries again at its end, and says so
            print(f"hetero: the output cannot be written: {exc.strerror}", file=sys.stderr)
            sys.exit(1)


def _nowhere() -> Any:
    return Path(os.devnull).open("w", encoding="utf-8")
