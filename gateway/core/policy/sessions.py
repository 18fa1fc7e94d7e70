"""Sessions in the policy: calls of one conversation or agent, which find in an engine's cache what they read before."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from gateway.core.policy.types import Bounds
from gateway.shared.files.units import Count, Factor, Seconds


class SessionsPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions: calls of one conversation or agent. Each is worth most on the engine that has read the ones before.

    `order`: Order of the calls that wait, within a tenant and class. warm: those whose prompt an engine has cached
    first, by `head_start`; least_served: those of sessions that were served much last, by `head_start` for each second
    that reading what they were served takes; arrival: earliest deadline first, as without sessions.
    `head_start`: Seconds by which a call goes before its turn, and for which it waits for the full engine that has its
    session cached, for each second of reading that a cache saves it. It passes nobody who came earlier than that. A
    call that begins a session leaves room to others, kept room and a quarter of an engine, for as many seconds for each
    second that reading its own prompt takes.
    `most_ahead`: Longest time by which a call goes before its turn, waits for its engine or leaves room to others,
    whatever it saves. A call of a session whose cache is lost leaves room for as long, unless its tenant was served
    less than another by all that fits the engines.
    `keep`: Longest time for which the cache of a session whose answer has ended is kept from calls that would push it
    out. The time is learned: that in which nine of ten calls of the tenant's sessions come back. 0s: none is kept.
    `per_tenant`: Sessions remembered of one tenant. The one that has been idle for longest is forgotten first.
    """

    order: Literal["warm", "least_served", "arrival"] = "warm"
    head_start: Annotated[Factor, Bounds(ge=0, le=1000)] = 10.0
    most_ahead: Annotated[Seconds, Bounds(ge=0, le=3600)] = 60.0
    keep: Annotated[Seconds, Bounds(ge=0, le=600)] = 30.0
    per_tenant: Annotated[Count, Bounds(ge=1, le=100_000)] = 2000
