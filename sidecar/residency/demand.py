"""Demand for this sidecar's models, by the gateways' answers: calls in flight, calls that wait, and withdrawals.

The sum over the gateways is a model's reference count. A gateway that has been silent for STALE seconds counts as zero;
the engine's own gauges still protect the calls it sent. An answer counts for a drain only if it answers a report made
after the drain had begun, since the gateway may have sent calls after an earlier answer.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gateway.shared.protocol import Demand, DemandReport

STALE = 10.0  # seconds
MOST = 1000  # gateways; more are a mistake or an attack
NOTHING = Demand(profile="-")


class Heard(msgspec.Struct):
    """A gateway's last answer: its time in monotonic seconds, the number of the report it answers, its demands by
    profile."""

    at: float
    sequence: int
    demands: dict[str, Demand]


class GatewayDemand:
    """The last answers of all gateways. `clock` gives monotonic seconds. `reports`: the number of the last report made.
    Reading changes nothing: `next_report` and `take` do."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard: dict[str, Heard] = {}
        self.reports = 0

    def next_report(self) -> int:
        """The number of a report that is about to be made."""
        self.reports += 1
        return self.reports

    def take(self, report: DemandReport) -> bool:
        """Take an answer in; False: a later answer is known, or there is one gateway too many."""
        now = self._clock()
        self._heard = {name: each for name, each in self._heard.items() if each.at > now - STALE}
        known = self._heard.get(report.gateway)
        if known is not None and report.sequence < known.sequence:
            return False
        if known is None and len(self._heard) >= MOST:
            return False
        demands = {demand.profile: demand for demand in report.demands}
        self._heard[report.gateway] = Heard(now, report.sequence, demands)
        return True

    def _live(self) -> list[Heard]:
        """The answers that count."""
        since = self._clock() - STALE
        return [each for each in self._heard.values() if each.at > since]

    def _of(self, profile: str) -> list[Demand]:
        return [each.demands.get(profile, NOTHING) for each in self._live()]

    def in_flight(self, profile: str) -> int:
        """Calls that hold a grant on its engine."""
        return sum(demand.in_flight for demand in self._of(profile))

    def waiting(self, profile: str) -> int:
        """Calls that wait for the model."""
        return sum(demand.waiting for demand in self._of(profile))

    def copy(self, profile: str) -> bool:
        """Whether it is a copy: every gateway that knows of it has another engine of its model."""
        said = [demand.copy for demand in self._of(profile) if demand is not NOTHING]
        return bool(said) and all(said)

    def all_heard_since(self, at: float) -> bool:
        """Whether every gateway that counts has answered since then."""
        return all(each.at > at for each in self._live())

    def drained(self, profile: str, after: int) -> bool | None:
        """Whether no gateway sends it anything any more, by answers to reports made after the report `after`; None:
        not all have answered, False: one has calls there."""
        for heard in self._live():
            demand = heard.demands.get(profile, NOTHING)
            if heard.sequence <= after:
                return None
            if demand.in_flight:
                return False
            if not demand.withdrawn and demand is not NOTHING:
                return None
        return True
