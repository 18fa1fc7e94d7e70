"""Admission rules: everything that one policy says of admission, worked out once."""

from __future__ import annotations

from gateway.core.admission.shaping import Shaping
from gateway.core.policy.policy import Policy


class AdmissionRules:
    """`order`: the classes, most important first; `rank`: the place of each in it. `limited`: how many calls of a class
    may run. `weights`: tenants' shares within a class. `predict` and `shed_late` are the policy's."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.order = tuple(policy.classes)
        self.rank = {name: place for place, name in enumerate(self.order)}
        self.shaping = Shaping(policy)
        self.limited = {
            name: each.max_concurrency for name, each in policy.classes.items() if each.max_concurrency is not None
        }
        self.weights = {name: tenant.weight for name, tenant in policy.tenants.items()}
        self.predict = policy.deadlines.predict
        self.shed_late = policy.deadlines.shed_late
