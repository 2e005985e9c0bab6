"""How many blocks of each KV group a request needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero.kv import states
from hetero.request import Request

if TYPE_CHECKING:
    from hetero.kv.manager import KVManager


def peak_blocks(kv: KVManager, num_tokens: int, chunk: int) -> list[int]:
    """Per group, the most blocks that a sequence of `num_tokens` ever holds when it is
    computed in chunks of at most `chunk` tokens."""
    peaks = []
    for group in kv.groups:
        peak = kv.num_blocks(num_tokens)
        if group.recurrent:
            peak = min(peak, states.PER_REQUEST)
        elif group.window is not None:
            peak = min(peak, kv.span_blocks(group.window + chunk - 1))
        peaks.append(peak)
    return peaks


def missing_blocks(kv: KVManager, request: Request, num_tokens: int, chunk: int) -> list[int]:
    """Per group, how many blocks more the request needs to reach `num_tokens` tokens."""
    missing = peak_blocks(kv, num_tokens, chunk)
    if kv.state_group is not None:
        missing[kv.state_group] = states.missing(kv, request)
    for g, table in enumerate(request.block_tables[: kv.num_kv_groups]):
        ahead = kv.num_blocks(num_tokens) - len(table)
        held = len(table) - kv.num_left_out(request, g)
        missing[g] = max(0, min(ahead, missing[g] - held))
    return missing
