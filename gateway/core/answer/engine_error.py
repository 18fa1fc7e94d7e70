"""Error answers of engines, translated into OpenAI's error object."""

from __future__ import annotations

import re

from gateway.core.request.outcome import STATUS, Outcome, error_body
from gateway.shared.vllm.answers import error_of

LOGGED_AT_MOST = 2000  # characters of an engine's message about its own failure
TOO_LONG = "context_length_exceeded"  # OpenAI's code, by which agents know to shorten their history
_too_long = re.compile("maximum (context|model) length", re.IGNORECASE).search  # vLLM 0.8 to 0.32


def engine_error(status: int, body: bytes) -> tuple[bytes, str]:
    """The body for the caller, OpenAI's error object, and a message for the log (empty: none).

    `body` is the engine's error answer in any of vLLM's forms. Its message about a bad request (4xx) is for the caller.
    Its message about its own failure (5xx) may hold paths, addresses and code, so it goes to the log alone.
    """
    advice = STATUS[Outcome.BAD_REQUEST if status < 500 else Outcome.UPSTREAM]
    error = error_of(body)
    if status >= 500:
        message = f"The engine failed with status {status}. The gateway's log has its message, under this request's id."
        return error_body(message, advice.type, advice.code), (error.message or "")[:LOGGED_AT_MOST]
    message = error.message or f"The engine answered {status} without saying why."
    code = error.code if isinstance(error.code, str) else TOO_LONG if _too_long(message) else advice.code
    return error_body(message, error.type or advice.type, code, error.param), ""
