"""Class of a call, and the deadlines that follow from it.

The first that applies decides: the `x-weir-class` header, OpenAI's `service_tier`, the classes' own `when` rules, the
tenant's default class, `default`. A client that asks for a better class than its tenant may have gets no error: the
call is clamped to the tenant's best class.
"""

from __future__ import annotations

import math

from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import When
from gateway.core.request.call import Call
from gateway.core.request.headers import time_limit


class ClassRules:
    """The policy's classes, prepared for `classify`.

    `order`: names from the most to the least important; `rank`: name to place in it. `deadlines`, `ttfts`: seconds.
    """

    def __init__(self, policy: Policy) -> None:
        self.order = tuple(policy.classes)
        self.rank = {name: rank for rank, name in enumerate(self.order)}
        self.deadlines = {name: each.deadline for name, each in policy.classes.items()}
        self.ttfts = {name: each.ttft or math.inf for name, each in policy.classes.items()}
        self.rules = tuple((name, each.when) for name, each in policy.classes.items() if each.when is not None)

    def known(self, name: str) -> str:
        """Return the class of this name, `default` if this policy has none: a reload may have removed a call's class,
        or its tenant's."""
        return name if name in self.rank else "default"

    def clamped(self, name: str, best: int) -> str:
        """The class, or the one of rank `best` where that is less important."""
        return self.order[min(best, len(self.order) - 1)] if self.rank[name] < best else name


def claim(call: Call, rules: ClassRules, claimed: str) -> None:
    """Apply the class that the caller's token names: of calls that ask for none, and the best that it may ask for."""
    asked, best = call.asked_class, rules.rank.get(claimed)
    if best is not None and (not asked or rules.rank[asked] < best):
        call.asked_class = claimed


def classify(call: Call, rules: ClassRules, default_class: str | None = None, best: int = 0) -> None:
    """Set the call's `class_name`, `deadline` and `ttft_by`. Needs its estimate of `prompt_tokens`.

    `default_class`: the tenant's default class. `best`: the rank of the best class that the tenant may have. Both may
    be of a policy that was replaced while the call's body came.
    """
    name = call.asked_class
    if not name:
        name = "default" if default_class is None else rules.known(default_class)
        for ruled, when in rules.rules:
            if _holds(call, when):
                name = ruled
                break
    if best:
        name = rules.clamped(name, best)
    call.class_name = name
    call.deadline = call.arrived + time_limit(call.asked_deadline, call.sdk_timeout, rules.deadlines[name])
    call.ttft_by = call.arrived + rules.ttfts[name]


def _holds(call: Call, when: When) -> bool:
    return (
        (when.prompt_tokens is None or call.prompt_tokens > when.prompt_tokens)
        and (not when.routes or call.route.kind in when.routes)
        and (not when.models or call.model in when.models)
    )
