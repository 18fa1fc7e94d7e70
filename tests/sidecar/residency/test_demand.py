"""Demand of gateways: sums, silence, and the end of a drain."""

from __future__ import annotations

import copy

from gateway.shared.protocol import Demand, DemandReport
from sidecar.residency.demand import MOST, STALE, GatewayDemand


class Heard:
    """Demand of gateways, and a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.demand = GatewayDemand(lambda: self.now)

    def say(self, gateway: str, sequence: int, *demands: Demand) -> bool:
        return self.demand.take(DemandReport(gateway=gateway, boot="b", sequence=sequence, demands=demands))


def of(in_flight: int = 0, waiting: int = 0, *, withdrawn: bool = False) -> Demand:
    return Demand(profile="m", in_flight=in_flight, waiting=waiting, withdrawn=withdrawn)


def test_the_gateways_are_added_up_and_a_silent_one_counts_no_more() -> None:
    heard = Heard()
    heard.say("one", 1, of(2, 1))
    heard.now += 4.0
    heard.say("two", 2, of(3, 4), Demand(profile="n", in_flight=9))
    assert (heard.demand.in_flight("m"), heard.demand.waiting("m")) == (5, 5)
    assert heard.demand.in_flight("unknown") == 0
    heard.now += STALE - 4.0
    assert (heard.demand.in_flight("m"), heard.demand.waiting("m")) == (3, 4)
    heard.now += 4.0
    assert heard.demand.in_flight("m") == 0


def test_an_older_answer_is_dropped_and_a_newer_one_replaces_all() -> None:
    heard = Heard()
    assert heard.say("one", 5, of(2))
    assert not heard.say("one", 4, of(7))
    assert heard.demand.in_flight("m") == 2
    assert heard.say("one", 6)
    assert heard.demand.in_flight("m") == 0


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
    assert heard.demand.drained("m", 10) is True  # nobody could send it anything
    heard.say("one", 10, of(withdrawn=True))
    assert heard.demand.drained("m", 10) is None
    heard.say("one", 11, of(withdrawn=True))
    assert heard.demand.drained("m", 10) is True
    heard.say("two", 11, of(1, withdrawn=True))
    assert heard.demand.drained("m", 10) is False
    heard.say("two", 12, of())  # it has not taken it out of its fleet yet
    assert heard.demand.drained("m", 10) is None
    heard.say("two", 13)  # it does not know the model at all
    assert heard.demand.drained("m", 10) is True


def test_asking_changes_nothing() -> None:
    heard = Heard()
    heard.say("silent", 1, of(2))
    heard.now += STALE
    heard.say("heard", 2, of(3))
    heard.now += STALE
    before = copy.deepcopy(vars(heard.demand)["_heard"])
    heard.demand.in_flight("m")
    heard.demand.waiting("m")
    heard.demand.all_heard_since(heard.now)
    heard.demand.drained("m", 1)
    assert vars(heard.demand)["_heard"] == before != {}
    heard.say("new", 3)
    assert list(vars(heard.demand)["_heard"]) == ["new"]


def test_it_is_a_copy_where_every_gateway_that_knows_it_says_so() -> None:
    heard = Heard()
    assert not heard.demand.copy("m"), "nobody says anything"
    heard.say("one", 1, Demand(profile="m", copy=True))
    heard.say("two", 1, Demand(profile="n"))
    assert heard.demand.copy("m")
    heard.say("three", 1, Demand(profile="m"))
    assert not heard.demand.copy("m"), "to one gateway it is the only engine"
    heard.now += STALE
    assert not heard.demand.copy("m")
