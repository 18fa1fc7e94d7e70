"""Sessions in the policy: calls of one conversation or agent, which find in an engine's cache what they read before."""

from __future__ import annotations

from typing import Annotated

import msgspec

from gateway.core.policy.types import Bounds
from gateway.shared.files.units import Seconds


class SessionsPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions: calls of one conversation or agent. Each is worth most on the engine that has read the ones before.

    `keep`: Longest time for which an ended answer's cache is kept from other calls; learned from the tenant's returns.
    0s: none.
    """

    keep: Annotated[Seconds, Bounds(ge=0, le=600)] = 30.0
