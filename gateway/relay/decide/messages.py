"""Messages of the decide port that have a body: a proxy's report of how a call that it forwarded has ended."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from gateway.core.answer.usage import Usage

# Before the answer's head: no connection, no answer in time, a connection that broke. After it: the engine's answer
# broke off. Either: the client has left.
Failure = Literal["connect", "timeout", "reset", "truncated", "client_gone"]
UNANSWERED = frozenset({"connect", "timeout", "reset"})
MOST = 16 * 1024  # bytes of one report


class BadReport(ValueError):
    """A report that cannot be read; the message says why."""


class EndReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`status`: of the engine's answer; null where there was none. `usage`: the engine's own object, as it came."""

    status: Annotated[int, msgspec.Meta(ge=200, le=599)] | None = None
    failure: Failure | None = None
    usage: Usage | None = None


_decode = msgspec.json.Decoder(EndReport).decode


def end_report(body: bytes) -> EndReport:
    """Raises BadReport."""
    try:
        report = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadReport(str(error)) from error
    if report.failure in UNANSWERED and report.status is not None:
        raise BadReport(f"`failure`: {report.failure} is before an answer, which therefore has no `status`")
    if report.status is None and (report.failure is None or report.failure == "truncated"):
        raise BadReport("`status`: it is missing: the status of the engine's answer")
    return report
