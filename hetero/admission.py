"""Whether there is room in the KV pools for one more request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetero.kv.capacity import missing_blocks, peak_blocks
from hetero.kv.manager import KVManager
from hetero.request import Request, RequestError

# After so many preemptions a request comes back only when nothing can preempt it again.
MAX_PREEMPTIONS = 3


def check_prompt_fits(num_prompt_tokens: int, max_model_len: int) -> None:
    """Raise RequestError when a prompt of this length leaves no room for one token."""
    if num_prompt_tokens >= max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens; together with at least one generated token "
            f"it must fit into a context of {max_model_len} tokens",
            field="prompt",
            code="context_length_exceeded",
        )
    if num_prompt_tokens < 1:
        raise RequestError("the prompt has no tokens", field="prompt", code=None)


class Admission:
    """Asked before a request is admitted. Remembers the last refusal, which need not be worked out again.

    After a preemption nobody is admitted until a request has ended, unless the worst case of all fits.
    """

    def __init__(self, kv: KVManager, chunk: int, max_total_tokens: Callable[[Request], int]):
        """`chunk`: the most tokens of a step. `max_total_tokens`: the length at which a request ends."""
        self._kv, self._chunk, self._max_total_tokens = kv, chunk, max_total_tokens
        self._refused: tuple[str, int, list[int]] | None = None  # who lacked room, when, with how much
        self._held = False

    def may_come(self, running: Sequence[Request], request: Request, step_id: int) -> bool:
        """Whether it is worth while to look what the request finds in the cache, and then for room."""
        if not running:
            return True  # alone it fits
        if self._held or request.num_preemptions >= MAX_PREEMPTIONS:
            return self._worst_case_fits(running, request)
        return not self.still_refused(request, step_id)

    def preempted(self) -> None:
        """Take note that a request had to give its blocks back."""
        self._held = True

    def one_ended(self) -> None:
        """Take note that a request has ended: there may be room for another."""
        self._held, self._refused = False, None

    def refuse(self, request: Request, step_id: int) -> None:
        """Take note that the request lacked room in this step."""
        self._refused = (request.request_id, step_id, self._kv.available_blocks())

    def still_refused(self, request: Request, step_id: int) -> bool:
        """Whether the request lacked room a few steps ago, and there is no more now.

        Spares the walk through the tree in each step; now and then the tree has grown.
        """
        if self._refused is None or self._refused[0] != request.request_id:
            return False
        _, refused_at, available = self._refused
        recent = step_id - refused_at < self._kv.block_size
        return recent and all(
            now <= then for now, then in zip(self._kv.available_blocks(), available, strict=True)
        )

    def _worst_case_fits(self, running: Sequence[Request], request: Request) -> bool:
        """Whether all that runs and `request` can go to their ends without any preemption."""
        peaks = [peak_blocks(self._kv, self._max_total_tokens(r), self._chunk) for r in (*running, request)]
        usable = [pool.num_usable for pool in self._kv.pools]
        return all(sum(need) <= most for need, most in zip(zip(*peaks, strict=True), usable, strict=True))

    def has_room(self, running: Sequence[Request], request: Request) -> bool:
        """Whether what all have to catch up with fits, and one block more for each to grow.

        Admitting on less would compute a prompt only to preempt it.
        """
        room = self._kv.available_blocks()
        for r in (*running, request):
            goal = min(r.num_tokens + self._kv.block_size, self._max_total_tokens(r))
            missing = missing_blocks(self._kv, r, goal, self._kv.block_size)
            room = [have - need for have, need in zip(room, missing, strict=True)]
        return min(room) >= 0
