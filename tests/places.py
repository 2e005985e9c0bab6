"""Where tests keep what is slow to make, between sessions; ignored by git."""

from pathlib import Path

PERSISTENT = Path(__file__).resolve().parent.parent / ".pytest_cache" / "hetero"
