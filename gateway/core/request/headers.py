"""Request headers by which a client names its class and its deadline.

`x-weir-class` names a class, `x-weir-deadline-ms` a deadline. A bad value of either is refused with status 400.
`x-weir-progress` asks for comments while a stream waits. `x-weir-fallback: none` refuses a model route's fallbacks.
`x-stainless-read-timeout` is the read timeout of OpenAI's and Anthropic's SDKs: seconds without a byte of the answer,
so it bounds no stream. A bad value of it is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gateway.core.request.call import CallSettings
from gateway.core.request.json_body import bad_request
from gateway.core.request.outcome import Refused

LONGEST_PROGRESS = 300.0  # seconds


def asked_class(header: bytes | None, tier: str | None, settings: CallSettings) -> str:
    """The class a client asks for: its `x-weir-class`, else the class its OpenAI `service_tier` maps to; empty: none.

    Raises Refused (400) where the header names no class of the policy. A tier that the policy does not map is ignored.
    """
    if header is not None:
        name = header.decode("latin-1")
        if name not in settings.class_deadlines:
            classes = ", ".join(settings.class_deadlines)
            raise bad_request(f"x-weir-class must be one of {classes}, found {name[:80]}", "x-weir-class")
        return name
    return "" if tier is None else settings.service_tiers.get(tier, "")


def asked_deadline(header: bytes | None, longest: float) -> float:
    """The client's deadline in seconds, 0: no header. Raises Refused (400) unless it is above 0 and up to `longest`."""
    if header is None:
        return 0.0
    milliseconds = _decimal(header)
    if not 0.0 < milliseconds <= longest * 1000.0:
        found = header[:80].decode("latin-1")
        raise bad_request(
            f"x-weir-deadline-ms must be a number above 0 and up to {longest * 1000.0:.0f}, found {found}",
            "x-weir-deadline-ms",
        )
    return milliseconds / 1000.0


def progress_interval(header: bytes | None, default: float | None) -> float:
    """Seconds between a waiting stream's progress comments, 0: none; `default` (None: none) where no header says.
    Raises Refused (400) unless it is 0 or from 1 to LONGEST_PROGRESS."""
    if header is None:
        return default or 0.0
    seconds = _decimal(header)
    if seconds and not 1.0 <= seconds <= LONGEST_PROGRESS:
        found = header[:80].decode("latin-1")
        raise bad_request(
            f"x-weir-progress must be 0 or a number of seconds from 1 to {LONGEST_PROGRESS:.0f}, found {found}",
            "x-weir-progress",
        )
    return seconds


def accepts_fallback(header: bytes | None) -> bool:
    """Whether the client of a model route accepts a fallback. Raises Refused (400) for a value other than `none`."""
    if header is not None and header != b"none":
        found = header[:80].decode("latin-1")
        raise bad_request(f"x-weir-fallback must be none, or left out, found {found}", "x-weir-fallback")
    return header is None


def sdk_timeout(headers: Mapping[bytes, bytes]) -> float:
    """The SDK's read timeout in seconds, 0 where it gives none or no number."""
    given = headers.get(b"x-stainless-read-timeout")
    return max(0.0, _decimal(given)) if given else 0.0


def time_limit(deadline: float, timeout: float, default: float) -> float:
    """Seconds from arrival to the call's deadline: the client's `deadline`, else its class's `default`.

    Never more than the SDK's read `timeout`, after which the client of a whole answer has hung up. `deadline` and
    `timeout` are 0 where not given.
    """
    limit = deadline or default
    return min(limit, timeout) if timeout > 0.0 else limit


def head_time_limit(headers: Mapping[bytes, bytes], settings: CallSettings) -> float:
    """Seconds from arrival to the deadline as far as the headers give one, infinite where they give none.

    It is needed before the body is here, so a bad deadline counts as none: `parse` refuses it. The SDK's read timeout
    is no limit of a body: it begins once the body is sent, and whether the answer streams is not known yet.
    """
    try:
        return asked_deadline(headers.get(b"x-weir-deadline-ms"), settings.max_deadline) or math.inf
    except Refused:
        return math.inf


def _decimal(value: bytes) -> float:
    """A plain decimal number. -1.0 for anything else, also for forms that float() takes: inf, nan, 1e9, 1_0."""
    return float(value) if len(value) <= 16 and value.replace(b".", b"", 1).isdigit() else -1.0
