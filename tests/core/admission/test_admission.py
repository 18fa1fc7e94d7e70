"""Admission control: which decision a call gets, in which order reasons are weighed, and with which numbers."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from msgspec import structs

from gateway.core.admission import refusals
from gateway.core.admission.admission import AdmissionControl
from gateway.core.admission.decision import KEPT, Reason, Refuse, Wait
from gateway.core.admission.mode import Mode
from gateway.core.admission.queues import Ticket
from gateway.core.engines.choice import ASIDE, Aside, Choice
from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.policy.policy import Policy, Routing
from gateway.core.policy.traffic import ModeRule, Modes, Threshold, TrafficClass
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome
from gateway.core.sidecars.copies import LongWait
from gateway.core.sidecars.sidecar import Outlook
from gateway.shared.vllm.answers import ModelCard
from tests.calls import a_call

NOW = 100.0
POLICY = Policy(
    classes={"default": TrafficClass(ttft=2.0, max_queue=1, max_concurrency=3), "batch": TrafficClass(max_queue=1)},
    modes=Modes(tight=ModeRule(enter=Threshold(), leave=Threshold(), refuse=("default",))),
)
RNG = random.Random(0)


def control(policy: Policy = POLICY, *, engines: int = 1, held: int = 0) -> AdmissionControl:
    """Over engines of 1,000 tokens, of which 800 may be promised, and 920 with the last call."""
    fleet = Fleet()
    for number in range(engines):
        engine = Engine(f"e{number}", f"http://{number}", policy, capacity=1000)
        fleet.add(engine)
        fleet.has_models(engine, [ModelCard(id="m")])
        engine.check(True, 0.0)
        if held:
            engine.hold(held, held, NOW)
    made = AdmissionControl(fleet, policy)
    made.workload.open("m", NOW)
    return made


def call(tokens: int = 400, **fields: Any) -> Call:
    return a_call(**{"arrived": NOW, "deadline": NOW + 60.0, "ttft_by": NOW + 2.0, "prompt_tokens": tokens, **fields})


def waiting(made: AdmissionControl, name: str = "default", calls: int = 1) -> list[Ticket]:
    tickets = [Ticket(call(class_name=name), NOW) for _ in range(calls)]
    for ticket in tickets:
        made.queues["m"].push(ticket)
    return tickets


def slow(made: AdmissionControl) -> None:
    """The model drains so slowly that nobody who has to wait is in time."""
    drain = made.traffic["m"].drain
    drain.taken(1000)
    drain.returned("default", 20, 100.0, NOW)  # of what is held, a hundredth in a second


def test_a_call_goes_to_an_engine_with_room_and_says_what_it_has_to_read() -> None:
    decision = control().decide(call(), NOW, RNG)
    assert isinstance(decision, Choice)
    assert (decision.engine.id, decision.prefill, decision.others_full) == ("e0", 400, False)
    made = control(engines=2)
    made.fleet.engines["e1"].ledger.slots = 0
    decision = made.decide(call(), NOW, RNG)
    assert isinstance(decision, Choice)
    assert decision.others_full


def test_reasons_are_weighed_in_their_order() -> None:
    """Everything is against the call; then one thing after the other is not."""
    made = control(held=700)
    slow(made)
    waiting(made)
    made.draining = True
    made.traffic["m"].state.mode = Mode.TIGHT
    made.traffic["m"].level = Mode.TIGHT.value
    late = call(900, deadline=NOW)
    found = []

    def refused(one: Call) -> Refuse:
        decision = made.decide(one, NOW, RNG)
        assert isinstance(decision, Refuse)
        found.append(decision.reason)
        return decision

    refused(late)
    made.draining = False
    refused(late)
    assert refused(call(921)).largest == 920
    assert "mode tight refuses class 'default'" in refused(call(800)).words
    made.traffic["m"].level = 0
    decision = refused(call(800))
    assert decision.predicted is not None
    assert decision.predicted == decision.foretold.wait > 2.0
    assert decision.newcomer
    made.apply(structs.replace(POLICY, deadlines="drop"))
    assert refused(call(800)).words == "1 calls"
    assert found == [
        Reason.DRAINING, Reason.OVERDUE, Reason.TOO_LARGE, Reason.MODE, Reason.TOO_LATE, Reason.QUEUE_FULL,
    ]  # fmt: skip
    made.queues["m"].remove(next(iter(made.queues["m"])))
    decision = made.decide(call(800), NOW, RNG)
    assert isinstance(decision, Wait)
    assert (decision.victim, decision.ticket.large) == (None, True)


def test_a_call_without_engines_is_weighed_by_what_sidecars_say() -> None:
    made = control(structs.replace(POLICY, routing=Routing(hold_unserved=0.0)))
    unknown = made.decide(call(model="x"), NOW, RNG)
    made.fleet.engines["e0"].down()
    down = made.decide(call(), NOW, RNG)
    assert isinstance(unknown, Refuse)
    assert isinstance(down, Refuse)
    assert unknown.reason is Reason.UNKNOWN_MODEL
    assert (down.reason, len(down.engines)) == (Reason.NO_ENGINE, 1)
    assert made.queues.keys() == {"m"}, "clients choose names of models: to ask keeps none"


def test_a_call_whose_engines_are_all_down_waits_for_one_to_come_back() -> None:
    made = control(engines=2)
    made.fleet.engines["e0"].down()
    made.fleet.engines["e1"].draining = True
    assert made.held_until("x", NOW) == -math.inf
    made.outages.look("m", NOW - 50.0)
    assert made.held_until("m", NOW) == NOW + 10.0
    held = made.decide(call(700, ttft_by=NOW + 100.0), NOW, RNG)
    assert isinstance(held, Wait)
    assert (held.held, held.outlook, held.predicted) == (True, None, None)
    assert held.ticket.expires == NOW + 60.0, "its own deadline"
    moved = made.to_wait(call(), NOW, front=True)
    assert isinstance(moved, Wait)
    assert moved.held
    large = made.decide(call(921), NOW, RNG)
    assert isinstance(large, Refuse)
    assert large.reason is Reason.TOO_LARGE
    waiting(made)
    full = made.decide(call(), NOW, RNG)
    assert isinstance(full, Refuse)
    assert full.reason is Reason.QUEUE_FULL
    over = made.decide(call(class_name="batch"), NOW + 10.0, RNG)
    assert isinstance(over, Refuse)
    assert over.reason is Reason.NO_ENGINE, "the outage has lasted for 60 s"
    made.fleet.engines["e1"].draining = False
    made.outages.look("m", NOW + 10.0)
    assert not made.outages.since


def test_nobody_waits_for_an_engine_that_is_about_to_be_forgotten() -> None:
    made = control()
    made.fleet.engines["e0"].draining = made.fleet.engines["e0"].leaving = True
    made.outages.look("m", NOW)
    decision = made.decide(call(), NOW, RNG)
    assert isinstance(decision, Refuse)
    assert (decision.reason, made.outages.since) == (Reason.NO_ENGINE, {})


def test_a_call_whose_model_is_made_ready_waits_for_it_if_that_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = control()
    made.fleet.engines["e0"].down()
    outlook = Outlook(sidecar="s", profile="p", ready_in=5.0)
    monkeypatch.setattr(made.sidecars, "outlook", lambda model, now: outlook)
    late = made.decide(call(), NOW, RNG)
    assert isinstance(late, Refuse)
    assert (late.reason, late.foretold.ready) == (Reason.NOT_READY, 5.0)
    waits = made.decide(call(ttft_by=NOW + 20.0), NOW, RNG)
    assert isinstance(waits, Wait)
    assert (waits.outlook, waits.predicted) == (outlook, 5.0)
    moved = made.to_wait(call(), NOW, front=True)
    assert isinstance(moved, Wait)
    assert (moved.outlook, moved.predicted) == (outlook, None), "it was granted before: nothing is weighed again"
    waiting(made)
    refused = call(ttft_by=NOW + 20.0, body=b"again")
    full = made.decide(refused, NOW, RNG)
    assert isinstance(full, Refuse)
    assert full.reason is Reason.QUEUE_FULL
    due_in = made.traffic["m"].book(made.queues["m"], refused, NOW, 5.0)
    assert due_in == 5.0, "before the model is ready nothing leaves the queue"
    back = made.decide(call(ttft_by=NOW + 30.0, body=b"again"), NOW + due_in, RNG)
    assert isinstance(back, Wait)
    assert back.booking is not None
    assert (back.ticket.promised, back.ticket.since) == (True, NOW)


def test_a_call_that_comes_back_for_its_place_is_weighed_by_no_prediction() -> None:
    made = control(held=700)
    slow(made)
    again = call(body=b"again")
    place = made.traffic["m"].bookings["default"].book(again, 1.0, NOW)
    assert place == 1.0
    back = call(body=b"again", arrived=NOW + 1.0, deadline=NOW + 61.0, ttft_by=NOW + 3.0)
    decision = made.decide(back, NOW + 1.0, RNG)
    assert isinstance(decision, Wait)
    assert decision.booking is not None
    assert (decision.ticket.since, decision.newcomer) == (NOW, False)
    assert made.traffic["m"].bookings["default"].due(back, NOW + 1.0) is decision.booking, "to ask uses up nothing"
    waiting(made)
    assert isinstance(made.decide(call(), NOW + 1.0, RNG), Refuse), "the only place is taken"
    assert isinstance(made.decide(back, NOW + 1.0, RNG), Wait), "but one was promised"
    waiting(made)
    assert isinstance(made.decide(back, NOW + 1.0, RNG), Wait), "and no newcomer takes that place"
    made.queues["m"].push(decision.ticket)
    full = made.decide(back, NOW + 1.0, RNG)
    assert isinstance(full, Refuse)
    assert (full.reason, full.booking, full.newcomer) == (Reason.QUEUE_FULL, decision.booking, False)


def test_a_more_important_call_names_the_one_that_makes_room() -> None:
    made = control(held=700)
    waiting(made)
    (victim,) = waiting(made, "batch")
    decision = made.decide(call(), NOW, RNG)
    assert isinstance(decision, Wait)
    assert decision.victim is victim
    assert len(made.queues["m"]) == 2, "it is named and not yet removed"


def test_a_class_that_is_gone_or_runs_all_it_may_goes_nowhere_at_once() -> None:
    made = control()
    assert made.at_once(call(class_name="gone"), NOW, RNG, frozenset()) is None
    made.workload.running["default"] = 3
    assert made.at_once(call(), NOW, RNG, frozenset()) is None
    assert made.workload.paused() == ["default"]
    (ticket,) = waiting(made)
    assert made.decide_waiting(ticket, made.queues["m"], NOW, RNG) is None


def test_a_call_that_no_engine_there_could_hold_is_passed_until_it_has_waited_half_of_its_time() -> None:
    made = control(engines=2, held=800)
    big, small = made.fleet
    big.ledger.capacity = 5000
    ticket = Ticket(call(1500, deadline=NOW + 60.0, ttft_by=math.inf), NOW)
    made.queues["m"].push(ticket)

    def decided(now: float = NOW) -> Choice | Refuse | Aside | None:
        return made.decide_waiting(ticket, made.queues["m"], now, RNG)

    big.ledger.slots = 1
    assert decided() is None, "it waits for the larger one"
    big.down()
    assert decided() is ASIDE
    refused = decided(NOW + 31.0)
    assert isinstance(refused, Refuse)
    assert (refused.reason, refused.waited) == (Reason.NO_ENGINE, 31.0)
    assert "(of 2: 1 down)" in refusals.refused(refused, ticket.call, NOW).message
    big.ledger.capacity = 1000
    refused = decided()
    assert isinstance(refused, Refuse)
    assert (refused.reason, refused.largest) == (Reason.TOO_LARGE, 920)
    small.down()
    assert decided() is None, "others decide about an outage"


def longest(made: AdmissionControl, model: str, now: float) -> LongWait | None:
    return made.workload.longest_wait(model, made.fleet.serving(model), now)


def test_the_longest_wait_leaves_out_classes_that_run_all_they_may() -> None:
    made = control()
    assert longest(made, "unheard", NOW) is None
    assert longest(made, "m", NOW) is None, "none waits"
    waiting(made, "batch")
    waiting(made)
    found = longest(made, "m", NOW + 5.0)
    assert found is not None
    made.workload.running["default"] = 3
    found = longest(made, "m", NOW + 5.0)
    assert found is not None
    assert (found.class_name, found.seconds >= 5.0, found.refused) == ("batch", True, False)


def test_a_call_that_waits_goes_stays_or_is_refused() -> None:
    made = control(held=300)
    (ticket,) = waiting(made)
    queues = made.queues["m"]

    def decided(now: float) -> Choice | Refuse | None:
        return made.decide_waiting(ticket, queues, now, RNG)

    assert isinstance(decided(NOW), Choice)
    late = decided(NOW + 1.99)
    assert isinstance(late, Refuse)
    assert late.reason is Reason.SHED_LATE
    assert late.foretold.waited == pytest.approx(1.99)
    expired = decided(NOW + 60.0)
    assert isinstance(expired, Refuse)
    assert (expired.reason, expired.waited) == (Reason.EXPIRED, 60.0)
    made.fleet.engines["e0"].ledger.slots = 1
    assert decided(NOW + 1.99) is None, "no engine could have it"
    assert made.overdue(ticket, NOW + 2.0).reason is Reason.SHED_LATE
    assert made.overdue(ticket, NOW + 60.0).reason is Reason.EXPIRED
    made.fleet.engines["e0"].down()
    assert made.overdue(ticket, NOW + 2.0).reason is Reason.NO_ENGINE


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_words_and_those_with_a_place_tell_of_it(reason: Reason) -> None:
    why = Refuse(reason=reason, words="w")
    told = refusals.refused(why, call(), NOW, 7.0)
    assert told.outcome is not Outcome.BUG
    assert told.kept == (reason in KEPT)
