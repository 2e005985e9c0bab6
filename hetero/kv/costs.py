"""Whether a block is worth copying, or better computed again: by what both were measured to cost."""

from __future__ import annotations

BYTE_SECONDS = 1 / 4e9  # until something was moved: a modest bus
TOKEN_SECONDS = 2e-4  # until a prompt was computed: a fast device
LOAD_SECONDS = 0.02  # of a step go to loading at most: running streams wait for them
MEMORY = 0.9  # of what was measured before counts with each new measurement
MIN_TOKENS = 32  # a step with fewer tells nothing about prompts: it reads the weights all the same
DOUBT = 0.99  # a refusal makes moves this much cheaper: after a slow spell they are tried again


class MoveCosts:
    """Seconds per byte moved and per token computed, as sums in which the newest count most."""

    def __init__(self) -> None:
        self._moved = (1.0, BYTE_SECONDS)  # bytes, seconds
        self._computed = (1.0, TOKEN_SECONDS)  # tokens, seconds

    @property
    def byte_seconds(self) -> float:
        return self._moved[1] / self._moved[0]

    @property
    def token_seconds(self) -> float:
        return self._computed[1] / self._computed[0]

    @property
    def is_guess(self) -> bool:
        """Whether no prompt was computed so far."""
        return self._computed == (1.0, TOKEN_SECONDS)

    def observe(self, moved_bytes: int, move_seconds: float, tokens: int, compute_seconds: float) -> None:
        """What a step has cost: at the slowest stage, where there are several."""
        if moved_bytes > 0 and move_seconds > 0:
            self._moved = _mix(self._moved, moved_bytes, move_seconds)
        if tokens >= MIN_TOKENS and compute_seconds > 0:
            self._computed = _mix(self._computed, tokens, compute_seconds)

    def gain(self, tokens: int, nbytes: int) -> float:
        """Seconds saved by loading `nbytes` rather than computing `tokens`; negative where it is slower."""
        return tokens * self.token_seconds - nbytes * self.byte_seconds

    def doubt(self) -> None:
        """Something was not moved because that was slower."""
        self._moved = self._moved[0], self._moved[1] * DOUBT

    @property
    def load_budget(self) -> int:
        """Bytes that one step should load at most."""
        return int(LOAD_SECONDS / self.byte_seconds)


def _mix(known: tuple[float, float], amount: float, seconds: float) -> tuple[float, float]:
    return known[0] * MEMORY + amount, known[1] * MEMORY + seconds
