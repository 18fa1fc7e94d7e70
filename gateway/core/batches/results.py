"""Results of a batch's lines: which answer of the gateway is one, and the line that it makes of the output file."""

from __future__ import annotations

import math

import msgspec
from msgspec import Raw

MAX_ANSWER = 64 * 1024**2  # bytes of an answer to a line; a line with a longer one goes to the error file
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
    """Line of an output or error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None


EXPIRED = LineError("batch_expired", "This request could not be executed before the completion window expired.")
_encode = msgspec.json.Encoder().encode
_raw = msgspec.json.Decoder(Raw)
_NULL = Raw(b"null")
_END = b'null},"error":null}'
_BLANKS = bytes.maketrans(b"\n\r", b"  ")


def again_in(status: int, retry_after: float | None, helps: bool, tries: int) -> float | None:
    """Seconds until a line is sent once more, after `tries` of it; None: this answer is its result. `helps`: nothing
    says that no retry can help. `retry_after`: the time that the answer names, which is not waited for in one piece."""
    if retry_after is not None and status in BUSY:
        return min(LATEST, max(0.1, retry_after))
    if not helps or status not in BUSY | FAILED or (status in FAILED and tries >= TRIES):
        return None
    return min(LATEST, LATER * math.pow(2.0, min(tries, 30) - 1))


def around(id: str, custom_id: str, status: int, request_id: str) -> tuple[bytes, bytes]:
    """Bytes before and after the body of an answer in its result line, line feed included."""
    whole = _encode(ResultLine(id, custom_id, LineResponse(status, request_id, _NULL), None))
    return whole[: -len(_END)], _END[len(_NULL) :] + b"\n"


def is_json(text: bytes | memoryview) -> bool:
    """Whether it is one value of JSON; its encoding is another question."""
    try:
        _raw.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def on_one_line(piece: bytes) -> bytes:
    """A piece of JSON without line feeds, which can only stand between its tokens."""
    return piece.translate(_BLANKS)


def no_json(status: int) -> LineError:
    """The error of an answer that is no JSON: of 502, whatever its status."""
    return LineError("upstream_error", f"The engine's answer of status {status} is no JSON.")


def too_long() -> LineError:
    """The error of an answer that was given up."""
    return LineError("answer_too_long", f"The answer has more than {MAX_ANSWER} bytes: ask for less.")


def unanswered_line(id: str, custom_id: str, error: LineError) -> bytes:
    """The line of a request that was not answered, with its line feed."""
    return _encode(ResultLine(id, custom_id, None, error)) + b"\n"
