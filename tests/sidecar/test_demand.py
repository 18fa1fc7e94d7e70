"""What counts of what gateways say: who is heard, for how long, and when nobody sends a model anything any more."""

from __future__ import annotations

from gateway.shared.protocol import Demand, DemandReport
from sidecar.residency.demand import MOST, STALE, Gateways


class Heard:
    """Gateways, and a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.gateways = Gateways(lambda: self.now)

    def say(self, gateway: str, sequence: int, *demands: Demand) -> bool:
        return self.gateways.heard(DemandReport(gateway=gateway, boot="b", sequence=sequence, demands=demands))


def of(in_flight: int = 0, waiting: int = 0, *, withdrawn: bool = False) -> Demand:
    return Demand(profile="m", in_flight=in_flight, waiting=waiting, withdrawn=withdrawn)


def test_the_gateways_are_added_up_and_a_silent_one_counts_no_more() -> None:
    heard = Heard()
    heard.say("one", 1, of(2, 1))
    heard.now += 4.0
    heard.say("two", 2, of(3, 4), Demand(profile="n", in_flight=9))
    assert (heard.gateways.in_flight("m"), heard.gateways.waiting("m")) == (5, 5)
    assert heard.gateways.in_flight("unknown") == 0
    heard.now += STALE - 4.0
    assert (heard.gateways.in_flight("m"), heard.gateways.waiting("m")) == (3, 4)
    heard.now += 4.0
    assert heard.gateways.in_flight("m") == 0


def test_an_older_answer_is_dropped_and_a_newer_one_replaces_all() -> None:
    heard = Heard()
    assert heard.say("one", 5, of(2))
    assert not heard.say("one", 4, of(7))
    assert heard.gateways.in_flight("m") == 2
    assert heard.say("one", 6)
    assert heard.gateways.in_flight("m") == 0


def test_one_gateway_too_many_is_not_heard_until_another_has_fallen_silent() -> None:
    heard = Heard()
    for number in range(MOST):
        assert heard.say(f"g{number}", 1)
    assert not heard.say("late", 1, of(1))
    assert heard.say("g0", 2, of(1))  # known already
    heard.now += STALE
    assert heard.say("late", 1, of(1))


def test_drained_is_what_every_gateway_says_of_a_report_from_after_the_order() -> None:
    heard = Heard()
    assert heard.gateways.drained("m", 10) is True  # nobody could send it anything
    heard.say("one", 10, of(withdrawn=True))
    assert heard.gateways.drained("m", 10) is None
    heard.say("one", 11, of(withdrawn=True))
    assert heard.gateways.drained("m", 10) is True
    heard.say("two", 11, of(1, withdrawn=True))
    assert heard.gateways.drained("m", 10) is False
    heard.say("two", 12, of())  # it has not taken it out of its fleet yet
    assert heard.gateways.drained("m", 10) is None
    heard.say("two", 13)  # it does not know the model at all
    assert heard.gateways.drained("m", 10) is True
