"""Copies: when one engine more of a model is wanted, where, and how often at most."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.sidecars.copies import APART, BEGINS, FIRST_REST, LAST_REST, PATIENCE, SETTLES, LongWait
from gateway.core.sidecars.sidecar import STALE
from gateway.core.sidecars.sidecars import Registry
from gateway.shared.protocol import CapacityReport, Demand, ModelReport

AWAKE = {"state": "running", "ready_in": 0.0, "url": "http://10.0.0.1:8000"}
SPARE = {"state": "sleeping", "ready_in": 2.0, "copy_in": 2.0}
WAKING = {"state": "sleeping", "pending": "wake", "ready_in": 2.0, "copy_in": 2.0}
LONG = LongWait("chat", 9.0)
SHORT = LongWait("chat", 1.0)


class Machines:
    """A registry over two sidecars; every second each reports, and the model `m` is considered."""

    def __init__(self, margin: float | None = 2.0) -> None:
        self.registry = Registry()
        self.registry.apply(("10.0.0.0/8",), (), 0.0, margin)
        self.now = 100.0
        self.sequence = 0
        self.a: dict[str, dict[str, Any]] = {"first": dict(AWAKE)}
        self.b: dict[str, dict[str, Any]] = {}
        self.silent: set[str] = set()
        self.lines: list[str] = []
        self.named = "m"  # by the calls that wait

    def report(self) -> None:
        self.sequence += 1
        for name, profiles in (("a", self.a), ("b", self.b)):
            if name not in self.silent:
                models = tuple(ModelReport(**{"profile": p, "model": "m"} | fields) for p, fields in profiles.items())
                control = f"http://10.0.0.{ord(name)}:8002"
                report = CapacityReport(sidecar=name, boot="b", sequence=self.sequence, control=control, models=models)
                self.registry.take(report, self.now, local=False)

    def step(self, wait: LongWait | None, seconds: int = 1) -> tuple[str, str] | None:
        """So many seconds with this wait; the place that is wanted then."""
        for _ in range(seconds):
            self.now += 1.0
            self.report()
            holders = self.registry.models.holders("m")
            line = self.registry.copies.step("m", holders, lambda name: wait if name == self.named else None, self.now)
            self.lines += [line] if line else []
        return self.registry.copies.place("m")

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        return dict(self.registry.copies.counts)

    def demands(self, name: str, serving: tuple[str, ...] = (), waiting: int = 0) -> dict[str, Demand]:
        found = self.registry.demands(name, self.now, lambda _: 0, lambda _: waiting, lambda _: serving)
        return {demand.profile: demand for demand in found}


@pytest.fixture
def machines() -> Machines:
    made = Machines()
    made.a["second"] = dict(SPARE)
    return made


def test_it_is_wanted_once_calls_have_waited_too_long_for_some_seconds(machines: Machines) -> None:
    assert machines.step(LONG, 3) is None
    assert machines.step(LONG) == ("a", "second")
    assert machines.lines == [
        "m: calls of class chat wait 9.0 s, and sidecar a can have second ready in 2.0 s: it is wanted as a copy"
    ]
    assert machines.counts == {("asked", "waiting"): 1}


def test_calls_that_wait_for_an_adapter_want_a_copy_that_has_it(machines: Machines) -> None:
    machines.named = "sql"
    machines.a["first"]["adapters"] = ("sql",)
    assert machines.step(LONG, 10) is None
    machines.b["third"] = SPARE | {"adapters": ("sql",), "copy_in": 3.0}
    assert machines.step(LONG, 4) == ("b", "third")


def test_a_moment_without_a_long_wait_begins_the_seconds_anew(machines: Machines) -> None:
    for _ in range(5):
        assert machines.step(LONG, 3) is None
        assert machines.step(SHORT) is None
        assert machines.step(LONG, 3) is None
        assert machines.step(None) is None
    assert machines.counts == {}


@pytest.mark.parametrize("wait", [None, SHORT, LongWait("chat", 4.0)])
def test_waits_within_the_margin_want_none(machines: Machines, wait: LongWait | None) -> None:
    assert machines.step(wait, 60) is None
    assert machines.registry.copies.wishes == {}, "and nothing is remembered"


def test_without_copies_in_the_policy_none_is_ever_wanted() -> None:
    machines = Machines(None)
    machines.a["second"] = dict(SPARE)
    assert machines.step(LONG, 60) is None
    assert machines.registry.copies.wishes == {}


def test_what_has_no_place_is_not_wanted(machines: Machines) -> None:
    machines.a["second"] |= {"copy_in": None}
    assert machines.step(LONG, 60) is None
    machines.a["second"] |= {"copy_in": 2.0}
    assert machines.step(LONG, 4) == ("a", "second")


def test_a_slow_one_is_wanted_only_for_a_wait_that_is_longer(machines: Machines) -> None:
    machines.a["second"] |= {"copy_in": 60.0}
    assert machines.step(LONG, 60) is None
    assert machines.step(LongWait("chat", 63.0, refused=True), 4) == ("a", "second")
    assert machines.counts == {("asked", "refused"): 1}
    assert "calls of class chat would wait 63.0 s" in machines.lines[0]


def test_the_one_that_is_ready_soonest(machines: Machines) -> None:
    machines.b["third"] = SPARE | {"copy_in": 1.0}
    assert machines.step(LONG, 4) == ("b", "third")


def test_of_equals_all_gateways_choose_one(machines: Machines) -> None:
    machines.b["another"] = dict(SPARE)
    assert machines.step(LONG, 4) == ("a", "second")


def test_once_it_is_awake_nothing_more_is_wanted_until_calls_have_spread(machines: Machines) -> None:
    machines.b["third"] = dict(SPARE)
    machines.step(LONG, 4)
    machines.a["second"] = dict(WAKING)
    assert machines.step(LONG, 2) == ("a", "second")
    machines.a["second"] = AWAKE | {"url": "http://10.0.0.1:8001"}
    assert machines.step(LONG) is None
    assert machines.lines[-1] == "m: the copy second of sidecar a is awake"
    assert machines.step(LONG, int(SETTLES) - 1) is None
    assert machines.step(LONG, 1) == ("b", "third")
    assert machines.counts == {("asked", "waiting"): 2, ("woken", "waiting"): 1}


def test_it_is_withdrawn_when_calls_wait_no_longer(machines: Machines) -> None:
    machines.step(LONG, 4)
    assert machines.step(SHORT, 3) == ("a", "second")
    assert machines.step(LONG) == ("a", "second")
    assert machines.step(None, 3) == ("a", "second")
    assert machines.step(None) is None
    assert machines.counts[("withdrawn", "waiting")] == 1
    machines.step(None, int(SETTLES))
    assert machines.registry.copies.wishes == {}


def test_it_is_withdrawn_when_the_policy_wants_no_copies_any_more(machines: Machines) -> None:
    machines.step(LONG, 4)
    machines.registry.apply(("10.0.0.0/8",), (), machines.now, None)
    assert machines.step(LONG) is None
    assert machines.lines[-1] == "m: no copies are wanted any more"


def test_one_that_has_begun_gets_ready_though_calls_wait_no_longer(machines: Machines) -> None:
    machines.step(LONG, 4)
    machines.a["second"] = dict(WAKING)
    assert machines.step(None, 20) == ("a", "second")
    machines.a["second"] = AWAKE | {"url": "http://10.0.0.1:8001"}
    assert machines.step(None) is None
    assert machines.counts[("woken", "waiting")] == 1


def test_one_that_fails_rests_ever_longer_and_the_model_goes_on_with_one(machines: Machines) -> None:
    rests = []
    for _ in range(7):
        while machines.step(LONG) is None:
            pass
        machines.a["second"] = dict(WAKING)
        machines.step(LONG)
        machines.a["second"] = {"state": "error", "last_error": "it died", "copy_in": 2.0}
        assert machines.step(LONG) is None
        failed_at = machines.now
        machines.a["second"] = dict(SPARE)
        while machines.step(LONG) is None:
            pass
        rests.append(machines.now - failed_at)
        machines.a["second"] = dict(WAKING)
        machines.step(LONG)
        machines.a["second"] = {"state": "error", "copy_in": 2.0}
        machines.step(LONG)
        machines.a["second"] = dict(SPARE)
    assert rests[0] == FIRST_REST + 3.0
    assert rests[-1] == LAST_REST + 3.0
    assert "m: no copy second of sidecar a (it died); it is not wanted for 30 s" in machines.lines
    assert any("(it did not get ready)" in line for line in machines.lines)


def test_while_one_rests_another_machine_is_asked(machines: Machines) -> None:
    machines.b["third"] = SPARE | {"copy_in": 3.0}
    machines.step(LONG, 4)
    machines.a["second"] = {"state": "error"}
    machines.step(LONG, int(BEGINS))
    assert "it was not begun" in machines.lines[-1]
    assert machines.step(LONG, int(SETTLES)) == ("b", "third")


def test_one_that_hangs_on_its_way_counts_as_failed(machines: Machines) -> None:
    machines.step(LONG, 4)
    machines.a["second"] = dict(WAKING)
    assert machines.step(LONG, int(PATIENCE)) == ("a", "second")
    machines.step(LONG, 4)
    assert "it takes too long" in machines.lines[-1]


def test_a_machine_that_is_cut_off_is_not_waited_for(machines: Machines) -> None:
    machines.b["third"] = SPARE | {"copy_in": 1.0}
    machines.step(LONG, 4)
    machines.silent.add("b")
    machines.step(LONG, int(STALE))
    assert "third of sidecar b (its sidecar is silent)" in machines.lines[-1]
    assert machines.step(LONG, int(SETTLES)) == ("a", "second")


def test_the_copy_that_another_gateway_wants_is_waited_for(machines: Machines) -> None:
    machines.b["third"] = WAKING | {"copy_in": 3.0}
    assert machines.step(LONG, 10) is None
    assert machines.counts == {}
    machines.b["third"] = AWAKE | {"url": "http://10.0.0.2:8001"}
    assert machines.step(LONG) is None
    assert machines.step(LONG, int(SETTLES)) == ("a", "second")
    assert len(machines.lines) == 1


def test_wakes_a_minute_are_bounded_whatever_becomes_of_copies(machines: Machines) -> None:
    """Somebody puts it to sleep again the moment it is awake, and calls wait on."""
    asked = 0
    for _ in range(600):
        if machines.step(LONG) is not None:
            asked += 1
            machines.a["second"] = dict(WAKING)
            machines.step(LONG)
            machines.a["second"] = AWAKE | {"url": "http://10.0.0.1:8001"}
            machines.step(LONG)
            machines.a["second"] = dict(SPARE)
    assert 10 <= asked <= 610 / APART * 2


def test_wishes_end_with_the_sidecars(machines: Machines) -> None:
    machines.step(LONG, 4)
    machines.registry.clear()
    assert machines.registry.copies.place("m") is None


# -- what sidecars are told -------------------------------------------------------------------------------------------

FIRST, SECOND = "10.0.0.1:8000", "10.0.0.2:8000"


def test_the_wish_is_told_with_the_calls_that_wait_and_one_at_least(machines: Machines) -> None:
    machines.step(LONG, 4)
    told = machines.demands("a", (FIRST,), waiting=7)
    assert (told["second"].copy, told["second"].waiting) == (True, 7)
    assert machines.demands("a", (FIRST,))["second"].waiting == 1, "those that were refused wait elsewhere"
    assert told["second"].idle is None, "which is no use of it"


def test_of_two_engines_that_serve_one_is_no_copy(machines: Machines) -> None:
    machines.b["first"] = AWAKE | {"url": "http://10.0.0.2:8000"}
    machines.step(None)
    told = {name: machines.demands(name, (FIRST, SECOND)) for name in "ab"}
    assert [told[name]["first"].copy for name in "ab"] == [False, True]
    assert told["a"]["second"].copy
    assert machines.demands("b", (SECOND,))["first"].copy is False, "the other one is down"


def test_beside_an_engine_of_the_policy_all_are_copies(machines: Machines) -> None:
    machines.step(None)
    assert machines.demands("a", (FIRST, "fixed:8000"))["first"].copy


def test_without_an_engine_that_serves_none_is_a_copy(machines: Machines) -> None:
    machines.step(None)
    assert not any(demand.copy for demand in machines.demands("a").values())
