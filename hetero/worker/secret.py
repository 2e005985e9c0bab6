"""The secret that a worker and its server share, and where it is kept."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from hetero.files import unreadable
from hetero.pipeline.handshake import MIN_SECRET

VARIABLE = "HETERO_WORKER_SECRET"
_log = logging.getLogger("hetero.worker")


class SecretError(ValueError):
    """No secret, or one that cannot be used: one line that says where it was looked for."""


@dataclass(frozen=True, slots=True)
class Secret:
    """`source` says where it came from; `value` is kept out of every text."""

    value: bytes
    source: str

    def __repr__(self) -> str:
        return f"Secret(from {self.source})"


def secret_path() -> Path:
    """Where a worker keeps the secret that it made up, and where a server looks for it."""
    import platformdirs

    return Path(platformdirs.user_data_dir("hetero", appauthor=False)) / "worker-secret"


def find_secret(file: str | os.PathLike | None = None, *, create: bool = False) -> Secret:
    """The secret in `file`, else in HETERO_WORKER_SECRET, else at secret_path().

    `create` makes one up, and writes it to secret_path() for this user alone, where there is none yet.
    Raises SecretError.
    """
    if file is not None:
        return _read(Path(file))
    if os.environ.get(VARIABLE):
        return _checked(os.environ[VARIABLE], VARIABLE)
    path = secret_path()
    if not path.exists():
        if not create:
            raise SecretError(
                f"no secret for workers: set {VARIABLE}, or copy the worker's secret file to {path}"
            )
        _write(path, secrets.token_urlsafe(32))
    return _read(path)


def _read(path: Path) -> Secret:
    try:
        text = path.read_text(encoding="utf-8")
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise SecretError(f"secret file {path}: {unreadable(error)}") from None
    secret = _checked(text, f"secret file {path}")
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        _log.warning("secret file %s: other users may read it; chmod 600 shuts them out", path)
    return secret


def _checked(text: str, source: str) -> Secret:
    value = text.strip()
    if len(value) < MIN_SECRET:
        raise SecretError(f"{source}: a secret has at least {MIN_SECRET} characters")
    return Secret(value.encode("utf-8", "surrogateescape"), source)


def _write(path: Path, text: str) -> None:
    """Written beside, then moved: no program finds half a secret."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise SecretError(f"secret file {path}: cannot be written: {error.strerror}") from None
