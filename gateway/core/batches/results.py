"""Results of a batch's lines: which answer of the gateway is one, and the line that it makes of the output file."""

from __future__ import annotations

import math

import msgspec
from msgspec import Raw

TRIES = 5  # of a line that engines fail
LATER = 2.0  # seconds until the first try after a failure, doubled with each
LATEST = 300.0  # seconds: a reload may give more quota, or bring engines, before the time that an answer names
# Answers of a gateway or an engine that has too much to do, that ends, or that is not there: none is the line's fault.
BUSY = frozenset({408, 429, 499, 503})
FAILED = frozenset({500, 502, 504})


class LineError(msgspec.Struct, frozen=True):
    """Reason why a line was not answered."""

    code: str
    message: str


class LineResponse(msgspec.Struct, frozen=True):
    """The answer to a line."""

    status_code: int
    request_id: str
    body: Raw


class ResultLine(msgspec.Struct, frozen=True):
    """One line of an output or error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None


EXPIRED = LineError("batch_expired", "This request could not be executed before the completion window expired.")
CANCELLED = LineError("batch_cancelled", "This request was not executed before the batch was cancelled.")
_encode = msgspec.json.Encoder().encode


def again_in(status: int, retry_after: float | None, helps: bool, tries: int) -> float | None:
    """Seconds until a line is sent once more, after `tries` of it; None: this answer is its result. `helps`: nothing
    says that no retry can help. `retry_after`: the time that the answer names, which is not waited for in one piece."""
    if retry_after is not None and status in BUSY:
        return min(LATEST, max(0.1, retry_after))
    if not helps or status not in BUSY | FAILED or (status in FAILED and tries >= TRIES):
        return None
    return min(LATEST, LATER * math.pow(2.0, min(tries, 30) - 1))


def answered_line(id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """The line of an answer, with its line feed. A body that is no JSON is an error of 502, whatever its status."""
    try:
        body.decode()
        whole = msgspec.json.format(body, indent=-1)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        said = LineError("upstream_error", f"The engine's answer of status {status} is no JSON.")
        return _encode(ResultLine(id, custom_id, None, said)) + b"\n"
    response = LineResponse(status, request_id, Raw(whole))
    return _encode(ResultLine(id, custom_id, response, None)) + b"\n"


def unanswered_line(id: str, custom_id: str, error: LineError) -> bytes:
    """The line of a request that was not answered, with its line feed."""
    return _encode(ResultLine(id, custom_id, None, error)) + b"\n"
