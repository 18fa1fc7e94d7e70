"""Workload: what waits and what runs. Queues and traffic by model, and calls that hold a grant by class.

Synchronous, no I/O; `now` is monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.admission.admission_rules import AdmissionRules
from gateway.core.admission.bookings import SOON
from gateway.core.admission.model_traffic import ModelTraffic
from gateway.core.admission.queues import Queues
from gateway.core.engines.choice import usable_of
from gateway.core.engines.engine import Engine
from gateway.core.sidecars.copies import LongWait


class Workload:
    """`running`: calls that hold a grant, by class."""

    def __init__(self, rules: AdmissionRules) -> None:
        self.queues: dict[str, Queues] = {}
        self.traffic: dict[str, ModelTraffic] = {}
        self.running = dict.fromkeys(rules.policy.classes, 0)
        self._rules = rules

    def apply(self, rules: AdmissionRules) -> None:
        """Go by `rules` from now on. Waiting calls keep their place, under the new weights; running calls go on."""
        self._rules, policy = rules, rules.policy
        for name in policy.classes:  # before the queues, which ask what runs
            self.running.setdefault(name, 0)
        for name in [name for name, calls in self.running.items() if not calls and name not in policy.classes]:
            del self.running[name]
        for queues in self.queues.values():
            queues.apply(policy.classes, rules.weights)
        for traffic in self.traffic.values():
            traffic.apply(policy)

    def open(self, model: str, now: float) -> tuple[Queues, ModelTraffic]:
        """The queues and traffic of a model, from now on kept."""
        if model not in self.queues:
            self.queues[model], self.traffic[model] = self.of(model, now)
        return self.queues[model], self.traffic[model]

    def of(self, model: str, now: float) -> tuple[Queues, ModelTraffic]:
        """The queues and traffic of a model, or empty ones that nobody keeps."""
        queues = self.queues.get(model)
        if queues is None:
            policy = self._rules.policy
            return Queues(policy.classes, self._rules.weights, self.paused), ModelTraffic(policy, now)
        return queues, self.traffic[model]

    def may_run(self, class_name: str) -> bool:
        """Whether the class may run one call more."""
        limit = self._rules.limited.get(class_name)
        return limit is None or self.running[class_name] < limit

    def paused(self) -> list[str]:
        """Classes that run as many calls as they may."""
        return [name for name, limit in self._rules.limited.items() if self.running[name] >= limit]

    def contended(self, queues: Queues) -> bool:
        """Whether several wait whose classes may start a call now."""
        return len(queues) - sum([queues.length(name) for name in self.paused()]) > 1

    def longest_wait(self, model: str, engines: Sequence[Engine], now: float) -> LongWait | None:
        """Class of a model whose calls wait longest; `engines` serve the model. Compared are the predicted wait of a
        class's last call, the wait so far of its first call, and the waits announced to refused calls. None if no call
        waits, no engine serves the model, or all waiting classes run as many calls as they may, so that another engine
        would not help."""
        queues = self.queues.get(model)
        if queues is None or not usable_of(engines, now):
            return None
        traffic, found = self.traffic[model], []
        for name in self._rules.policy.classes:
            if not self.may_run(name):
                continue
            found.append(LongWait(name, traffic.away(name, now), refused=True))
            ends = queues.ends(name)
            if ends is not None:
                first, last = ends
                wait = max(now - first.pushed_at, traffic.wait(queues, last.call, now, last))
                found.append(LongWait(name, wait))
        longest = max(found, key=lambda each: each.seconds, default=None)
        return None if longest is None or not longest.seconds else longest

    def wait_estimate(self, model: str, now: float) -> float:
        """Seconds until all that waits now has been served: queued tokens over the drain rate (Little's law)."""
        queues, traffic = self.of(model, now)
        return traffic.drain.wait(queues.total_tokens, now) or SOON
