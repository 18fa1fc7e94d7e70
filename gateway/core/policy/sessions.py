"""Sessions in the policy: calls of one conversation or agent, which find in an engine's cache what they read before."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from gateway.core.policy.types import Bounds
from gateway.shared.files.units import Count, Factor, Seconds


class SessionsPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions: calls of one conversation or agent. Each is worth most on the engine that has read the ones before.

    `order`: Order of waiting calls within a tenant and class. warm: cached prompts first, by `head_start`;
    least_served: sessions that were served much last; arrival: earliest deadline first.
    `head_start`: Seconds, for each second of reading that a cache saves, by which a call goes before its turn and waits
    for its session's full engine. A new session leaves room for as long, by its own prompt.
    `most_ahead`: Longest such time. A call of a session whose cache is lost leaves room for as long, unless its tenant
    was served less than another by all that fits the engines.
    `keep`: Longest time for which an ended answer's cache is kept from other calls; learned from the tenant's returns.
    0s: none.
    `per_tenant`: Sessions remembered of one tenant; the one idle for longest is forgotten first.
    """

    order: Literal["warm", "least_served", "arrival"] = "warm"
    head_start: Annotated[Factor, Bounds(ge=0, le=1000)] = 10.0
    most_ahead: Annotated[Seconds, Bounds(ge=0, le=3600)] = 60.0
    keep: Annotated[Seconds, Bounds(ge=0, le=600)] = 30.0
    per_tenant: Annotated[Count, Bounds(ge=1, le=100_000)] = 2000
