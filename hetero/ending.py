"""Why a request ends with a step, if it does."""

from __future__ import annotations

from hetero.request import FinishReason, Request


def why_it_ends(
    request: Request, due: bool, token: int | None, reason: FinishReason | None, most: int
) -> FinishReason | None:
    """Append the next token, if one was sampled, and say whether the request goes on (None).

    `due`: a next token was wanted, or it is the end of what is to be embedded. `reason`: what sampling knows.
    `most`: tokens after which a request ends.
    """
    if token is not None:
        request.output_token_ids.append(token)
    if request.abort_requested:
        return None if request.in_flight else FinishReason.ABORT
    if reason is not None:
        return reason
    if due and token is None:
        return FinishReason.ERROR  # without a next token it could never go on
    return FinishReason.LENGTH if request.num_tokens >= most else None
