"""Blocks for sequences that cannot be shared."""

from __future__ import annotations

from hetero.batch import BlockCopy
from hetero.kv.manager import KVManager
from hetero.request import Request


class UncachedKV(KVManager):
    """Counts blocks, and finds nothing again: a model with states can only go on with a sequence.

    A block belongs to one request at a time.
    """

    def match(self, request: Request, *, load: bool = True, kept: int = 0) -> int:
        """See KVManager.match: nothing ever continues a request."""
        return 0

    def match_tail(self, request: Request) -> list[BlockCopy]:
        return []

    def commit(self, request: Request, num_tokens: int) -> None:
        """Nothing is remembered."""

    def release(self, request: Request, *, cache: bool) -> None:
        super().release(request, cache=False)
