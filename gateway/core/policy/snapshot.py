"""One policy and everything that is worked out from it once: what a call goes by from its first line to its last.

A reload makes a new one and swaps the pointer; calls under way keep theirs. Counters, queues and ledgers are not here.
"""

from __future__ import annotations

from gateway.core.policy.policy import Policy
from gateway.core.request.body_memory import SMALL
from gateway.core.request.browser_guard import BrowserGuard
from gateway.core.request.call import CallSettings
from gateway.core.request.classes import ClassRules
from gateway.core.request.routes import Route
from gateway.core.request.tenants import Tenants


class Snapshot:
    """`cache_secret`: what tenants' cache salts are made with; empty: none are. Raises ValueError for a policy that
    only looks right; see Tenants."""

    __slots__ = ("browser_guard", "calls", "classes", "order", "policy", "small", "tenants", "within_deadline")

    def __init__(self, policy: Policy, cache_secret: bytes = b"") -> None:
        self.policy = policy
        self.calls = call_settings(policy)
        self.classes = ClassRules(policy)
        self.order = self.classes.order
        self.tenants = Tenants(policy, cache_secret=cache_secret)
        self.small = min(SMALL, policy.body.max)  # bytes of a body that no route refuses, and that nobody counts
        self.browser_guard = BrowserGuard(policy.server.hosts, policy.cors.origins) if self.tenants.open else None
        self.within_deadline = policy.deadlines.on_deadline == "cancel"


def largest_body(policy: Policy, route: Route | None = None) -> int:
    """Bytes of the largest body that a route takes; of any route where none is given."""
    body = policy.body
    carries = route is None or route.kind == "audio" or (route.media and body.media != "none")
    return max(body.max, body.max_media) if carries else body.max


def call_settings(policy: Policy) -> CallSettings:
    """What the parser needs of the policy."""
    return CallSettings(
        class_deadlines={name: traffic_class.deadline for name, traffic_class in policy.classes.items()},
        default_class="default",
        service_tiers=dict(policy.service_tiers),
        max_values=policy.body.max_values,
        max_text=policy.body.max,
        max_messages=policy.body.max_messages,
        max_n=policy.body.max_n,
        media=policy.body.media,
        media_hosts=frozenset(policy.body.media_hosts),
        block=policy.routing.block,
    )
