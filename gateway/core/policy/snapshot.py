"""Snapshot of one policy, with the tables derived from it: settings of the parser, classes, tenants, browser guard.

A call keeps one snapshot from its first line to its last. A reload makes a new snapshot and swaps the pointer, and
running calls keep theirs. Counters, queues and ledgers are not here: they outlast a reload.
"""

from __future__ import annotations

from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import Merge
from gateway.core.request.body_memory import SMALL
from gateway.core.request.browser_guard import BrowserGuard
from gateway.core.request.call import CallSettings
from gateway.core.request.classes import ClassRules
from gateway.core.request.routes import Route
from gateway.core.request.tenants import Tenants, TokenCheck

BYTES_PER_VALUE = 20  # of the largest body: so many JSON values and field names may it hold
BYTES_PER_MESSAGE = 1024  # the same, of messages, prompts, inputs and documents
LEAST_VALUES, LEAST_MESSAGES = 104_857, 2048  # however small the largest body is: those of 2 MiB


class Snapshot:
    """`cache_secret`: the secret that tenants' cache salts are derived from; empty: no salts. `tokens`: who verifies
    tokens; None: none are. Raises ValueError as `Tenants` does."""

    def __init__(self, policy: Policy, cache_secret: bytes = b"", tokens: TokenCheck | None = None) -> None:
        self.policy = policy
        self.calls = call_settings(policy)
        self.classes = ClassRules(policy)
        self.order = self.classes.order
        self.tenants = Tenants(policy, cache_secret=cache_secret, tokens=tokens)
        self.small = min(SMALL, policy.body.max)  # bytes of a body that every route takes, and that is not counted
        self.browser_guard = BrowserGuard(policy.server.hosts, policy.cors) if self.tenants.open else None
        self.merges = {kind: Merge(window=window) for kind, window in policy.batching.items()}


class Current:
    """Policy in force, in one cell that all its readers share: a reload is one assignment.

    Only what must react to a new policy (queues, buckets, breakers) has an `apply` of its own.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.apply(snapshot)

    def apply(self, snapshot: Snapshot) -> None:
        """Put this policy in force."""
        self.policy = snapshot.policy
        self.snapshot = snapshot


def largest_body(policy: Policy, route: Route | None = None) -> int:
    """Bytes of the largest body that the route takes; None: that any route takes."""
    body = policy.body
    carries = route is None or route.form or (route.media and body.media != "none")
    return max(body.max, body.max_media) if carries else body.max


def call_settings(policy: Policy) -> CallSettings:
    """The parser's part of the policy."""
    media = policy.body.media
    return CallSettings(
        class_deadlines={name: traffic_class.deadline for name, traffic_class in policy.classes.items()},
        default_class="default",
        service_tiers=dict(policy.service_tiers),
        max_values=max(LEAST_VALUES, policy.body.max // BYTES_PER_VALUE),
        max_text=policy.body.max,
        max_messages=max(LEAST_MESSAGES, policy.body.max // BYTES_PER_MESSAGE),
        max_n=policy.body.max_n,
        media="data_urls_only" if isinstance(media, tuple) else media,
        media_hosts=frozenset(media if isinstance(media, tuple) else ()),
        model_routes=frozenset(policy.models),
    )
