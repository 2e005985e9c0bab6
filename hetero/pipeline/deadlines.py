"""How long a step may take before whoever computes it counts as hung."""

from __future__ import annotations

STEP_SECONDS = 4.0  # the least that a step may take over ggml's RPC before the server counts as hung
DRIVER_SECONDS = 60.0  # the same elsewhere: a driver may compile a kernel at any new shape
PATIENCE = 20.0  # times the slowest step of its size, lately
NEW_SECONDS = 20.0  # the least for a size that was not seen before: kernels are compiled, graphs are built
NEW_PATIENCE = 3.0  # times what other sizes make one expect at most
FIRST_SECONDS = 60.0  # for the first steps of all
MOVED_BYTES = 4 << 20  # a second: moves over the slowest network that anybody would use
FADING = 0.99  # of a slow step's weight, with each further one


class Deadlines:
    """How long a step may take, from how long steps took. Sizes are classes of doubling token counts."""

    def __init__(self, network: bool = False) -> None:
        """`network`: whoever computes cannot be asked whether it lives, so that only time tells."""
        self._network = network
        self._slowest: dict[int, float] = {}  # size: seconds
        self._steps = 0

    def seconds(self, tokens: int) -> float:
        size = tokens.bit_length()
        if size in self._slowest:
            return max(self.least, PATIENCE * self._slowest[size])
        if not self._slowest:
            return FIRST_SECONDS
        guess = min(seconds * 2.0 ** max(0, size - seen) for seen, seconds in self._slowest.items())
        return max(self.least, NEW_SECONDS, NEW_PATIENCE * guess)

    @property
    def least(self) -> float:
        return STEP_SECONDS if self._network else DRIVER_SECONDS

    def observe(self, tokens: int, seconds: float) -> None:
        self._steps += 1
        if self._steps > 1:  # the first loads what the later ones find in memory
            size = tokens.bit_length()
            self._slowest[size] = max(FADING * self._slowest.get(size, 0.0), seconds)

    def check_invariants(self) -> None:
        assert len(self._slowest) < max(1, self._steps)
        for size, slowest in self._slowest.items():
            assert self.seconds(1 << (size - 1)) >= max(self.least, PATIENCE * slowest)
