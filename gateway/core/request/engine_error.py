"""An engine's own error, in the shape that callers know."""

from __future__ import annotations

from gateway.core.request.outcome import STATUS, Outcome, error_body
from gateway.shared.vllm.answers import error_of

LOGGED_AT_MOST = 2000  # characters of an engine's words on its own failure


def engine_error(status: int, body: bytes) -> tuple[bytes, str]:
    """An engine's own error as the error object our callers know, whatever form it came in, and words for the log.

    What it says of a request is the caller's to know. What it says of its own failure may hold paths, addresses and
    code, and is for the log alone.
    """
    advice = STATUS[Outcome.BAD_REQUEST if status < 500 else Outcome.UPSTREAM]
    error = error_of(body)
    if status >= 500:
        message = f"The engine failed with status {status}. The gateway's log has its words, under this request's id."
        return error_body(message, advice.type, advice.code), (error.message or "")[:LOGGED_AT_MOST]
    answer = error_body(
        error.message or f"The engine answered {status} without saying why.",
        error.type or advice.type,
        error.code if isinstance(error.code, str) else advice.code,
        error.param,
    )
    return answer, ""
