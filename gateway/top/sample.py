"""Sample of a gateway: the answers of its control port, decoded. No I/O and no arithmetic.

The types of the answers are the control port's own. An answer of another shape is from a gateway of another version.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from gateway.control.calls import CallsView
from gateway.control.view import FleetView
from gateway.shared.files.file_status import FileStatus
from gateway.shared.files.units import SECONDS
from gateway.shared.vllm.answers import AnswerError, series_of

T = TypeVar("T")

# Counters since the gateway's start, summed over all labels that are not part of the key:
#   ("calls", class, outcome)   ("tokens", kind)   ("tenant calls" | "tenant tokens", tenant)
#   ("wait", class, upper bound in seconds): calls sent to an engine whose wait was not above it
Counts = dict[tuple[str, ...], float]

_COUNTERS: dict[bytes, tuple[str, tuple[str, ...]]] = {  # metric -> first part of the key, and the labels it ends with
    b"weir_requests_total": ("calls", ("class", "outcome")),
    b"weir_tokens_total": ("tokens", ("kind",)),
    b"weir_tenant_requests_total": ("tenant calls", ("tenant",)),
    b"weir_tenant_tokens_total": ("tenant tokens", ("tenant",)),
    b"weir_queue_seconds_bucket": ("wait", ("class", "le")),
}


class Summary(msgspec.Struct, frozen=True):
    """/summary: the gateway's version, and which policy it goes by."""

    gateway: str
    policy: FileStatus


class Point(msgspec.Struct, frozen=True):
    """Counters, and when they were read, in monotonic seconds of whoever read them."""

    at: float
    counts: Counts


class Sample(msgspec.Struct, frozen=True):
    """All that is asked for at one time. `targets`: seconds to the first token that the policy promises, by class, in
    the policy's order."""

    point: Point
    summary: Summary
    fleet: FleetView
    calls: CallsView
    targets: dict[str, float | None]


class _Class(msgspec.Struct, frozen=True):
    ttft: str | None


class _Policy(msgspec.Struct, frozen=True):
    classes: dict[str, _Class]


class _PolicyAnswer(msgspec.Struct, frozen=True):
    policy: _Policy


def counts_from(text: bytes) -> Counts:
    """The Prometheus text of /metrics. Raises AnswerError where it is cut off or cannot be read."""
    counts: Counts = {}
    for name, rows in series_of(text, frozenset(_COUNTERS)).items():
        first, ends = _COUNTERS[name]
        for labels, value in rows:
            key = (first, *(labels.get(label, "") for label in ends))
            counts[key] = counts.get(key, 0.0) + value
    return counts


def targets_from(answer: bytes) -> dict[str, float | None]:
    """The classes of /policy?format=json and their targets for the first token, in seconds. Raises AnswerError."""
    classes = read(answer, _PolicyAnswer).policy.classes
    return {name: None if each.ttft is None else SECONDS.parse(each.ttft) for name, each in classes.items()}


def read(answer: bytes, kind: type[T]) -> T:
    """A JSON answer of that shape. Raises AnswerError."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise AnswerError(str(error)) from error
