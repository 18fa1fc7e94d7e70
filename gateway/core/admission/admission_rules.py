"""Rules that one policy has for admission, worked out once."""

from __future__ import annotations

from gateway.core.admission.shaping import Shaping
from gateway.core.policy.policy import Policy
from gateway.core.request.classes import ClassRules


class AdmissionRules:
    """Rules that one policy has for admission, worked out once. `rank`: the place of each class, the most important
    first. `limited`: how many calls of a class may run. `weights`: tenants' shares within a class. `tpots`: targets for
    the time per output token, of classes that have one. `predict` and `shed_late`: the policy's
    `deadlines`. `outside`: models of providers, each with its provider."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.classes = ClassRules(policy)
        self.rank = self.classes.rank
        self.shaping = Shaping(policy)
        self.limited = {
            name: each.max_concurrency for name, each in policy.classes.items() if each.max_concurrency is not None
        }
        self.weights = {name: tenant.weight for name, tenant in policy.tenants.items()}
        self.tpots = {name: each.tpot for name, each in policy.classes.items() if each.tpot is not None}
        self.outside = {model: each for each in policy.providers.values() for model in each.models}
        self.predict = policy.deadlines == "refuse"
        self.shed_late = policy.deadlines != "run"
