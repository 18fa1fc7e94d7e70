"""Failure of a request to an engine: a reason from a fixed set, which is a metric's label, and words for operators."""

from __future__ import annotations

import msgspec

from gateway.shared.vllm.answers import EngineSample

# The connection: refused, no way to it, its name, no answer in time, ended. TLS: the certificate, or the rest. The
# answer: no HTTP or no JSON, cut off, another status than 200, no list of models, the engine's word that it sleeps. No
# work done beside good health checks. And what is no fault of the engine's.
REASONS = (
    "refused",
    "unreachable",
    "name",
    "timeout",
    "reset",
    "tls_untrusted",
    "tls_name",
    "tls_expired",
    "tls",
    "garbage",
    "truncated",
    "status",
    "models",
    "asleep",
    "stalled",
    "descriptors",
)
ASLEEP = "asleep"  # a call to it would wait until somebody wakes it
STALLED = "stalled"  # it answers its health checks, and works on no call
OWN = "descriptors"  # the gateway has none left: no fault of the engine's, and nothing was sent


class Trouble(msgspec.Struct, frozen=True):
    """Trouble that a check or a call met. `at`: monotonic seconds. `reason`: one of REASONS."""

    reason: str
    words: str
    at: float = 0.0


def asleep(sample: EngineSample, now: float) -> Trouble | None:
    """The trouble of an engine that says it sleeps or is paused; None: it is awake, or does not tell."""
    state = sample.sleep_state
    return None if state in (None, "awake") else Trouble(ASLEEP, f"it says that it sleeps ({state})", now)
