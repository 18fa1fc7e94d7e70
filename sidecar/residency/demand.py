"""What the gateways say of this sidecar's models: calls in flight, calls that wait, and that they send no more.

The sum over the gateways is a model's reference count. A gateway that has not been heard for STALE seconds counts as
zero; the engine's own gauges still protect what it sent. An answer counts for a drain only if it answers a report that
was made after the drain had begun: what a gateway said before that it may have changed since.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gateway.shared.protocol import Demand, DemandReport

STALE = 10.0  # seconds
MOST = 1000  # gateways; more are a mistake or an attack
NOTHING = Demand(profile="-")


class Heard(msgspec.Struct):
    """A gateway's last answer: when it came, to which report, and what it says by profile."""

    at: float
    sequence: int
    demands: dict[str, Demand]


class Gateways:
    """All gateways that have answered. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard: dict[str, Heard] = {}

    def heard(self, report: DemandReport) -> bool:
        """Take an answer in; False for one that is older than what is known, or from one gateway too many."""
        known = self._heard.get(report.gateway)
        if known is not None and report.sequence < known.sequence:
            return False
        if known is None and len(self.live) >= MOST:
            return False
        demands = {demand.profile: demand for demand in report.demands}
        self._heard[report.gateway] = Heard(self._clock(), report.sequence, demands)
        return True

    @property
    def live(self) -> dict[str, Heard]:
        """Those that count."""
        since = self._clock() - STALE
        self._heard = {name: each for name, each in self._heard.items() if each.at > since}
        return self._heard

    def _of(self, profile: str) -> list[Demand]:
        return [each.demands.get(profile, NOTHING) for each in self.live.values()]

    def in_flight(self, profile: str) -> int:
        """Calls that hold a grant on its engine."""
        return sum(demand.in_flight for demand in self._of(profile))

    def waiting(self, profile: str) -> int:
        """Calls that wait for the model."""
        return sum(demand.waiting for demand in self._of(profile))

    def heard_since(self, at: float) -> bool:
        """Whether every gateway that counts has answered since then."""
        return all(each.at > at for each in self.live.values())

    def drained(self, profile: str, after: int) -> bool | None:
        """Whether no gateway sends it anything any more, by answers to reports made after the report `after`; None:
        not all have answered, False: one has calls there."""
        for heard in self.live.values():
            demand = heard.demands.get(profile, NOTHING)
            if heard.sequence <= after:
                return None
            if demand.in_flight:
                return False
            if not demand.withdrawn and demand is not NOTHING:
                return None
        return True
