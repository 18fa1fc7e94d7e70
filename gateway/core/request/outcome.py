"""Outcomes of calls, their HTTP statuses, and refusals (`Refused`) with their error bodies and Retry-After.

There is one enum, one status table and one error body. Every refusal in the gateway is a `Refused`, and nothing else
builds an error answer. An outcome starts as BUG and is replaced only by code that knows how the call ended. So a
forgotten path counts as the gateway's fault, and never as a success.
"""

from __future__ import annotations

import math
import random
from enum import Enum
from typing import Literal

import msgspec

MODEL_AWAY = "model_away"  # a reason of NOT_FOUND
ISSUER_KEYS = "issuer_keys"  # a reason of UPSTREAM
LONGEST = 60.0  # seconds of Retry-After that clients obey; openai-python's bound


class Outcome(Enum):
    """The way a call ended. Its value is the metric label and the log field."""

    OK = "ok"
    BAD_REQUEST = "bad_request"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    TOO_LARGE = "too_large"
    RATE_LIMITED = "rate_limited"
    QUEUE_FULL = "queue_full"
    SHED = "shed"
    NO_ENGINE = "no_engine"
    DRAINING = "draining"
    MODEL_UNAVAILABLE = "model_unavailable"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    EXPIRED = "expired"
    UPSTREAM = "upstream"
    ENGINE_REFUSED = "engine_refused"  # the engine's own 4xx, passed through: it teaches no learner
    TRUNCATED = "truncated"
    CLIENT_GONE = "client_gone"
    SLOW_CLIENT = "slow_client"
    STORAGE_FULL = "storage_full"
    BUG = "bug"

    # Members are dict keys on the hot path; Enum's own __hash__ is a Python function that hashes the name.
    __hash__ = object.__hash__


OK, BUG = Outcome.OK, Outcome.BUG  # to look a member up in its Enum takes as long as a call of a function


class Status(msgspec.Struct, frozen=True):
    """Row of the status table: HTTP status, OpenAI's `type` and `code`, and whether a retry can help."""

    status: int
    type: str
    code: str
    retry: bool


_INVALID = "invalid_request_error"

STATUS: dict[Outcome, Status] = {
    Outcome.BAD_REQUEST: Status(400, _INVALID, "invalid_request_error", False),
    Outcome.UNAUTHORIZED: Status(401, "authentication_error", "invalid_api_key", False),
    Outcome.FORBIDDEN: Status(403, "permission_error", "not_allowed", False),
    Outcome.NOT_FOUND: Status(404, _INVALID, "model_not_found", False),
    Outcome.METHOD_NOT_ALLOWED: Status(405, _INVALID, "method_not_allowed", False),
    Outcome.TOO_LARGE: Status(413, _INVALID, "request_too_large", False),
    Outcome.RATE_LIMITED: Status(429, "rate_limit_error", "rate_limit_exceeded", True),
    Outcome.QUEUE_FULL: Status(503, "server_error", "server_is_overloaded", True),
    Outcome.SHED: Status(503, "server_error", "server_is_overloaded", True),
    Outcome.NO_ENGINE: Status(503, "server_error", "server_is_overloaded", True),
    Outcome.DRAINING: Status(503, "server_error", "server_is_overloaded", True),
    Outcome.MODEL_UNAVAILABLE: Status(503, "server_error", "server_is_overloaded", True),
    Outcome.DEADLINE_UNREACHABLE: Status(503, "server_error", "deadline_unreachable", True),
    Outcome.EXPIRED: Status(504, "server_error", "deadline_exceeded", True),
    Outcome.UPSTREAM: Status(502, "server_error", "upstream_error", True),
    Outcome.TRUNCATED: Status(502, "server_error", "upstream_error", True),
    Outcome.CLIENT_GONE: Status(499, "server_error", "client_closed_request", False),
    Outcome.SLOW_CLIENT: Status(499, "server_error", "client_too_slow", False),
    Outcome.STORAGE_FULL: Status(507, "server_error", "storage_full", True),
    Outcome.BUG: Status(500, "server_error", "internal_error", True),
}


Kind = Literal["answered", "refused", "failed", "caller"]


def kind_of(outcome: Outcome) -> Kind:
    """answered; refused: this gateway's decision; failed: an engine's or our fault; caller: the caller's doing."""
    if outcome is Outcome.OK:
        return "answered"
    match STATUS[outcome].status if outcome in STATUS else 400:
        case 429 | 503 | 504:
            return "refused"
        case 500 | 502 | 507:
            return "failed"
        case _:
            return "caller"


_LEVELS: dict[Kind, bytes] = {"answered": b"info", "caller": b"info", "refused": b"warning", "failed": b"error"}
LEVELS: dict[Outcome, bytes] = {each: _LEVELS[kind_of(each)] for each in Outcome}  # of the call's line in the log


def got(outcome: Outcome, status: int) -> str:
    """Describe what the caller got. `status`: the HTTP status that was sent, or 499 if the caller had left."""
    if status == 499:
        return f"no answer ({outcome.value})"
    if status >= 400 or outcome is Outcome.OK:
        return f"{status} ({outcome.value})"
    ending = "broken off" if outcome is Outcome.TRUNCATED else "then an error"
    return f"{status}, {ending} ({outcome.value})"


class ErrorObject(msgspec.Struct, frozen=True):
    """OpenAI's error object. `param`: the field of the request that is at fault, if any."""

    message: str
    type: str
    param: str | None
    code: str


class _ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorObject


_encode = msgspec.json.Encoder().encode


def error_body(message: str, type: str, code: str, param: str | None = None) -> bytes:
    """The JSON bytes of `{"error": {"message", "type", "param", "code"}}`."""
    return _encode(_ErrorBody(ErrorObject(message, type, param, code)))


class Refused(Exception):
    """A refusal: the call will not be answered by an engine.

    `message`: what happened, whose limit it was and what to do; `full_message` adds the time to retry at. `param`: the
    field or header at fault. `code`: replaces the table's code where one outcome has several. `retry_after`: seconds;
    None where a retry cannot help. `headers`: extra header lines, as `name: value\\r\\n`. `retry`: False where no retry
    of this call can help, whatever the table says. `limit`: the rate limit that was reached, as `600/min requests`.
    `kept`: the call has a booking for the time of `retry_after`, which therefore gets no jitter. `reason`: a more
    precise word than the outcome's. `detail`: the message for the log, which may name what clients must not know.
    """

    def __init__(
        self,
        outcome: Outcome,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: bytes = b"",
        retry: bool = True,
        limit: str = "",
        kept: bool = False,
        reason: str = "",
        detail: str = "",
    ) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.headers = headers
        self.retry = retry
        self.limit = limit
        self.kept = kept
        self.reason = reason or outcome.value
        self.detail = detail or message
        self.own: tuple[int, bytes] | None = None  # status and body that replace those of the table
        self.jittered = False

    def copy(self) -> Refused:
        """The same refusal for one more caller, with a traceback of its own."""
        other = Refused(self.outcome, self.message)
        vars(other).update(vars(self))
        return other

    def replace(self, status: int, body: bytes) -> None:
        """Answer with this status and JSON body instead: a tenant's own refusal."""
        self.own = status, body

    def jitter(self, rng: random.Random) -> None:
        """Add jitter to `retry_after`, so that callers refused together do not come back together.

        It becomes at least one second. Up to LONGEST it grows by up to a quarter, unless the call has a booking: booked
        times are spread already. Headers and body then give the same time. A second call has no effect.
        """
        if self.retry_after is not None and not self.jittered:
            self.jittered = True
            seconds = max(1.0, self.retry_after)
            if not self.kept and seconds <= LONGEST:
                seconds = min(LONGEST, seconds * rng.uniform(1.0, 1.25))
            self.retry_after = seconds

    @property
    def helps(self) -> bool:
        """Whether a retry can help."""
        return self.retry and STATUS[self.outcome].retry

    @property
    def full_message(self) -> str:
        """The message and the time to retry at, in whole seconds as in Retry-After."""
        if self.retry_after is None or not self.helps:
            return self.message
        seconds = math.ceil(self.retry_after)
        long = f" ({seconds // 3600} h {seconds % 3600 // 60} min)" if seconds >= 3600 else ""
        return f"{self.message} Try again in {seconds} s{long}{': a place is kept' if self.kept else ''}."

    @property
    def status(self) -> int:
        """HTTP status of the answer."""
        return STATUS[self.outcome].status if self.own is None else self.own[0]

    @property
    def ours(self) -> bool:
        """Whether the gateway or its engines are the cause, and not the client. Then limits do not count the call."""
        return STATUS[self.outcome].status >= 500 and self.outcome is not Outcome.EXPIRED

    def body(self) -> bytes:
        """The error object as the caller receives it."""
        if self.own is not None:
            return self.own[1]
        advice = STATUS[self.outcome]
        return error_body(self.full_message, advice.type, self.code or advice.code, self.param)


class AwaitsKeys(Refused):
    """The issuer's keys are being read; once they are, the token may be accepted."""


def refusal_headers(refused: Refused, rng: random.Random) -> bytes:
    """Header lines of a refusal: `x-weir-reason`, a link to its explanation, and Retry-After or `x-should-retry`.

    openai-python obeys `x-should-retry` before `retry-after-ms`, and that before `retry-after`. It ignores times above
    LONGEST and would retry after a second. So for those the lines hold both `retry-after` and `x-should-retry: false`.
    """
    reason = refused.reason.encode()
    lines = refused.headers + b'x-weir-reason: %b\r\nlink: </outcomes/%b>; rel="help"\r\n' % (reason, reason)
    if not refused.helps:
        return lines + b"x-should-retry: false\r\n"
    refused.jitter(rng)
    seconds = refused.retry_after
    if seconds is None:
        return lines
    if seconds > LONGEST:
        return lines + b"retry-after: %d\r\nx-should-retry: false\r\n" % math.ceil(seconds)
    return lines + b"retry-after: %d\r\nretry-after-ms: %d\r\n" % (math.ceil(seconds), math.ceil(seconds * 1000))
