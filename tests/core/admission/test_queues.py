"""Queue order between classes, between tenants and within a tenant; room, estimates, reload."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest

from gateway.core.admission import fairness
from gateway.core.admission.queues import Queues, Ticket
from gateway.core.policy.traffic import TrafficClass
from tests.calls import a_call, ahead

CLASSES = {"interactive": TrafficClass(weight=8), "default": TrafficClass(weight=4), "batch": TrafficClass(weight=1)}
ONE = {"default": TrafficClass()}
NEVER = 1e9  # so late that nothing starves


def ticket(class_name: str = "default", tokens: int = 100, at: float = 0.0, **fields: Any) -> Ticket:
    """Ticket of a call with these `fields`; `since` and `large`: the ticket's own."""
    since, large = fields.pop("since", None), fields.pop("large", False)
    call = a_call(**{"class_name": class_name, "arrived": at, "prompt_tokens": tokens, "deadline": 1000.0, **fields})
    return Ticket(call, at, since=since, large=large)


def yes(_: Ticket) -> bool:
    return True


def no(_: Ticket) -> bool:
    return False


def pushed(queues: Queues, *tickets: Ticket, front: bool = False) -> list[Ticket]:
    for each in tickets:
        queues.push(each, front=front)
    return list(tickets)


def popped(queues: Queues, number: int | None = None, now: float = 0.0) -> list[Ticket]:
    found = (queues.pop(yes, now) for _ in range(len(queues) if number is None else number))
    return [each for each in found if each is not None]


def tenants(tickets: list[Ticket]) -> str:
    return "".join(each.call.tenant for each in tickets)


# -- between classes --------------------------------------------------------------------------------------------------


def test_first_come_first_served_within_a_class() -> None:
    queues = Queues(CLASSES)
    tickets = pushed(queues, *(ticket() for _ in range(5)))
    assert popped(queues) == tickets
    assert queues.pop(yes, 0.0) is None
    assert (len(queues), queues.total_tokens) == (0, 0)


def test_backlogged_classes_share_tokens_by_weight_within_one_call() -> None:
    rng = random.Random(7)
    queues = Queues(CLASSES)
    largest = 500
    for name in CLASSES:
        pushed(queues, *(ticket(name, rng.randint(1, largest)) for _ in range(3000)))
    served: Counter[str] = Counter()
    for _ in range(2000):
        (each,) = popped(queues, 1)
        served[each.call.class_name] += each.cost
        shares = [served[name] / settings.weight for name, settings in CLASSES.items()]
        assert max(shares) - min(shares) <= largest / 1 + largest / 4


def test_an_idle_class_saves_no_credit() -> None:
    queues = Queues(CLASSES)
    pushed(queues, *(ticket() for _ in range(1000)))
    popped(queues, 500)
    pushed(queues, *(ticket("interactive") for _ in range(100)))
    names = Counter(each.call.class_name for each in popped(queues, 30))
    assert names["default"] >= 9, "a class just back must not take more than its share (8 of 12)"


@pytest.mark.parametrize("another", [0, 1])
def test_a_class_that_comes_back_first_to_an_empty_band_saves_no_credit_either(another: int) -> None:
    queues = Queues({"first": TrafficClass(strict=True), "default": TrafficClass(), "batch": TrafficClass()})
    pushed(queues, *(ticket("first") for _ in range(another)), *(ticket() for _ in range(50)))
    while queues.length("default"):
        queues.pop(yes, 0.0, {"first"})
    pushed(queues, *(ticket("batch") for _ in range(50)))
    pushed(queues, *(ticket() for _ in range(50)))
    assert queues.length("first") == another
    popped(queues, another)
    assert Counter(each.call.class_name for each in popped(queues, 20)) == {"batch": 10, "default": 10}


@pytest.mark.parametrize(("large", "reserve", "passes"), [(False, 0.0, False), (False, 0.1, True), (True, 0.0, True)])
def test_a_head_that_does_not_fit_is_passed_if_it_is_large_or_by_a_class_with_a_reserve(
    large: bool, reserve: float, passes: bool
) -> None:
    queues = Queues(CLASSES | {"batch": TrafficClass(weight=1, reserve=reserve)})
    pushed(queues, ticket("interactive", 1000, large=large), ticket("batch", 1))
    assert (queues.pop(lambda each: each.cost < 100, 0.0) is not None) is passes


@pytest.mark.parametrize("now", [0.0, 9.0], ids=["in order", "starving"])
@pytest.mark.parametrize("headroom", [0.0, 0.2])
def test_a_class_with_headroom_holds_nobody_up(headroom: float, now: float) -> None:
    queues = Queues({"filler": TrafficClass(headroom=headroom), "default": TrafficClass()})
    pushed(queues, ticket("filler", 1000, deadline=10.0))
    (other,) = pushed(queues, ticket("default", 1))
    assert queues.pop(lambda each: each.cost < 100, now) is (other if headroom else None)


def test_no_class_with_a_reserve_passes_one_that_starves() -> None:
    queues = Queues(CLASSES | {"batch": TrafficClass(weight=1, reserve=0.1)})
    for name in ("default", "batch"):
        pushed(queues, ticket(name, 1, deadline=10.0), ticket(name, 1, deadline=10.0))
    popped(queues, 2, now=4.0)
    pushed(queues, ticket("interactive", 1000))
    assert [each.call.class_name for each in queues.heads(5.1)] == ["interactive", "default", "batch"]
    assert queues.pop(lambda each: each.cost < 100, 5.1) is None
    assert queues.pop(lambda each: each.cost < 100, 4.9) is not None


def test_a_large_head_that_does_not_fit_lets_others_pass_until_half_its_time() -> None:
    queues = Queues(CLASSES)
    pushed(queues, ticket("interactive", 1000, deadline=10.0, large=True))
    (small,) = pushed(queues, ticket("batch", 1))

    def fits(each: Ticket) -> bool:
        return each.cost < 100

    assert queues.pop(fits, 5.1) is None, "past half of its time nothing passes it"
    assert queues.pop(fits, 4.9) is small
    assert len(queues) == 1


@pytest.mark.parametrize(
    ("since", "now", "passes"), [(None, 1.9, True), (None, 2.1, False), (-1.0, 1.4, True), (-1.0, 1.6, False)]
)
def test_a_deadline_and_a_booking_say_when_half_its_time_is_over(since: float | None, now: float, passes: bool) -> None:
    queues = Queues({"default": TrafficClass(weight=9), "batch": TrafficClass()})
    pushed(queues, ticket(tokens=1000, since=since, deadline=4.0, large=True), ticket("batch", 1))
    assert (queues.pop(lambda each: each.cost < 100, now) is not None) is passes


def test_a_paused_class_is_left_out_and_holds_nobody_up() -> None:
    queues = Queues(CLASSES)
    pushed(queues, ticket("interactive", deadline=10.0))
    (other,) = pushed(queues, ticket("batch"))
    assert queues.pop(yes, 9.0, {"interactive"}) is other
    assert queues.pop(yes, 9.0, {"interactive"}) is None
    assert len(queues) == 1


def test_a_class_that_comes_back_is_not_ahead_by_what_a_paused_one_was_not_served() -> None:
    queues = Queues(dict.fromkeys(CLASSES, TrafficClass()), paused=lambda: {"batch"})
    pushed(queues, ticket("batch"), *(ticket("interactive") for _ in range(20)))
    for _ in range(10):
        queues.pop(yes, 0.0, {"batch"})
    pushed(queues, *(ticket("default") for _ in range(5)))
    went = [queues.pop(yes, 0.0, {"batch"}) for _ in range(6)]
    assert Counter(each.call.class_name for each in went if each) == {"interactive": 3, "default": 3}


def test_a_class_that_comes_back_is_not_ahead_by_it_either_once_that_one_is_served() -> None:
    paused = {"batch"}
    queues = Queues(dict.fromkeys(CLASSES, TrafficClass()), paused=lambda: paused)
    pushed(queues, ticket("batch"), *(ticket("interactive") for _ in range(20)))
    for _ in range(20):
        queues.pop(yes, 0.0, paused)
    paused.clear()
    assert len(popped(queues)) == 1
    pushed(queues, *(ticket("default") for _ in range(9)), *(ticket("interactive") for _ in range(9)))
    assert Counter(each.call.class_name for each in popped(queues, 6)) == {"interactive": 3, "default": 3}


def test_nor_while_that_one_catches_up() -> None:
    paused = {"batch"}
    queues = Queues(dict.fromkeys(CLASSES, TrafficClass()), paused=lambda: paused)
    pushed(queues, *(ticket(name) for name in ("batch", "interactive") for _ in range(40)))
    for _ in range(20):
        queues.pop(yes, 0.0, paused)
    paused.clear()
    assert popped(queues, 1)[0].call.class_name == "batch"
    pushed(queues, *(ticket("default") for _ in range(9)))
    paused.add("batch")
    went = [queues.pop(yes, 0.0, paused) for _ in range(6)]
    assert Counter(each.call.class_name for each in went if each) == {"interactive": 3, "default": 3}


def test_a_strict_class_goes_before_all_after_it() -> None:
    classes = {
        "first": TrafficClass(strict=True, weight=0.01),
        "default": TrafficClass(weight=1),
        "third": TrafficClass(weight=3, strict=True),
        "last": TrafficClass(weight=1000),
    }
    queues = Queues(classes)
    for name in reversed(classes):
        pushed(queues, *(ticket(name) for _ in range(8)))
    order = [each.call.class_name for each in popped(queues)]
    assert order[:8] == ["first"] * 8
    assert Counter(order[8:16]) == {"default": 2, "third": 6}, "one band: shared by weight"
    assert order[24:] == ["last"] * 8


def test_a_class_under_a_strict_one_gets_a_call_in_half_its_time() -> None:
    queues = Queues({"first": TrafficClass(strict=True), "default": TrafficClass()})
    pushed(queues, *(ticket("first", deadline=NEVER) for _ in range(100)))
    pushed(queues, *(ticket(deadline=10.0) for _ in range(100)))
    names = []
    for second in range(40):
        assert queues.pop(no, second) is None
        (each,) = popped(queues, 1, now=second)
        names.append(each.call.class_name)
    assert [at for at, name in enumerate(names) if name == "default"] == [6, 12, 18, 24, 30, 36]


def test_heads_are_those_that_pop_would_ask() -> None:
    queues = Queues(CLASSES)
    tickets = pushed(queues, ticket("batch", 1), ticket("interactive"), ticket(large=True))
    popped(queues, 1)
    asked: list[Ticket] = []

    def refuses(each: Ticket) -> bool:
        asked.append(each)
        return False

    queues.pop(refuses, 0.0)
    assert asked == list(queues.heads(0.0)) == [tickets[2], tickets[0]]
    for late in queues.heads(0.0):
        queues.remove(late)
    assert not queues


# -- between tenants --------------------------------------------------------------------------------------------------


def test_tenants_take_turns_whoever_sends_more() -> None:
    queues = Queues(ONE)
    pushed(queues, *(ticket(tenant="a") for _ in range(6)), *(ticket(tenant="b") for _ in range(3)))
    assert tenants(popped(queues)) == "abababaaa"


def test_a_tenant_gets_its_weight() -> None:
    queues = Queues(ONE, {"a": 3.0})
    pushed(queues, *(ticket(tenant=name) for name in "ab" for _ in range(40)))
    assert Counter(tenants(popped(queues, 40))) == {"a": 30, "b": 10}


def test_a_token_written_counts_twice() -> None:
    queues = Queues(ONE)
    for name, prompt, output in (("a", 100, 0), ("b", 0, 100)):
        pushed(queues, *(ticket(tenant=name, prompt_tokens=prompt, output_tokens=output) for _ in range(40)))
    assert Counter(tenants(popped(queues, 30))) == {"a": 20, "b": 10}


def test_a_tenant_that_was_away_has_saved_nothing() -> None:
    queues = Queues(ONE)
    pushed(queues, *(ticket(tenant="a") for _ in range(60)))
    popped(queues, 40)
    pushed(queues, *(ticket(tenant="b") for _ in range(60)))
    assert Counter(tenants(popped(queues, 10))) == {"a": 5, "b": 5}
    popped(queues)
    pushed(queues, *(ticket(tenant="c") for _ in range(9)), *(ticket(tenant="a") for _ in range(9)))
    assert Counter(tenants(popped(queues, 10))) == {"c": 5, "a": 5}


def test_a_tenant_with_a_larger_call_waits_for_others_to_catch_up() -> None:
    queues = Queues(ONE)
    pushed(queues, *(ticket(tenant="a", tokens=400) for _ in range(3)), *(ticket(tenant="b") for _ in range(9)))
    assert tenants(popped(queues)) == "abbbbabbbbab"


def test_real_usage_replaces_the_estimate_once() -> None:
    queues = Queues(ONE)
    pushed(queues, *(ticket(tenant=name) for name in "ab" for _ in range(40)))
    first, second = popped(queues, 2)
    assert tenants([first, second]) == "ab"
    for _ in range(2):
        queues.correct(first, 200, 50)
    assert tenants(popped(queues, 6)) == "bbabab", "a has used 300, b 100"
    queues.correct(second, 0, 0)
    assert tenants(popped(queues, 3)) == "bab", "b had been charged for what it did not use"


def test_a_correction_moves_a_tenant_that_waits_elsewhere() -> None:
    queues = Queues(ONE)
    pushed(queues, *(ticket(tenant=name) for name in "abc" for _ in range(9)))
    first, *_ = popped(queues, 3)
    queues.correct(first, 350, 0)
    assert tenants(popped(queues, 6)) == "bcbcbc"
    assert tenants(popped(queues, 2)) == "ab"


def test_a_correction_finds_a_tenant_that_has_left() -> None:
    queues = Queues(ONE)
    (left, *_) = pushed(queues, ticket(tenant="a"), *(ticket(tenant=name) for name in "bc" for _ in range(9)))
    popped(queues, 5)
    queues.correct(left, 450, 0)
    pushed(queues, *(ticket(tenant="a") for _ in range(9)))
    assert tenants(popped(queues, 7)) == "bcbcbca"


def test_a_ticket_that_waits_again_is_corrected_when_it_has_gone() -> None:
    queues = Queues(ONE)
    pushed(queues, *(ticket(tenant=name) for name in "ab" for _ in range(9)))
    (moved,) = pushed(queues, ticket(tenant="a"), front=True)
    queues.correct(moved, 10**6, 0)
    assert tenants(popped(queues, 5)) == "aabab"


def test_corrections_nobody_is_owed_change_nothing() -> None:
    queues = Queues(CLASSES)
    waiting, withdrawn, gone = pushed(queues, ticket(), ticket(tenant="b"), ticket("batch"))
    queues.correct(waiting, 10**9, 0)
    queues.remove(withdrawn)
    queues.correct(withdrawn, 10**9, 0)
    popped(queues)
    queues.apply(ONE, {})
    queues.correct(gone, 10**9, 0)
    pushed(queues, *(ticket(tenant=name) for name in "tb" for _ in range(9)))
    assert Counter(tenants(popped(queues, 10))) == {"t": 5, "b": 5}


def test_what_an_engine_reports_is_believed_within_reason() -> None:
    queues = Queues(ONE)
    pushed(queues, *(ticket(tenant=name) for name in "abc" for _ in range(4)))
    less, more, _ = popped(queues, 3)
    queues.correct(less, -(10**9), -(10**9))
    queues.correct(more, 10**18, 10**18)
    accounts = queues._by_class["default"]._tenants
    assert [accounts[name].counter for name in "abc"] == [0, 3 * fairness.CREDIBLE, 100]
    popped(queues)
    pushed(queues, ticket(tenant="c"), ticket(tenant="a"))
    assert tenants(popped(queues)) == "ca", "both are lifted to what the last to wait had"


def test_idle_tenants_are_forgotten_from_a_number_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "REMEMBERED", 4)
    queues = Queues(ONE)
    accounts = queues._by_class["default"]._tenants
    pushed(queues, ticket(tenant="waits", tokens=1), ticket(tenant="waits", tokens=1))
    for tokens in (30, 10, 20, 40, 50):
        pushed(queues, ticket(tenant=f"t{tokens}", tokens=tokens))
    first = popped(queues, 5)
    assert len(accounts) == 6, "those who wait do not count"
    popped(queues, 1)
    pushed(queues, ticket(tenant="x"))
    accounts = queues._by_class["default"]._tenants
    assert set(accounts) == {"waits", "t50", "t40", "x"}, "those who wait, and the longest leads"
    queues.correct(first[1], 10**6, 0)
    assert "t30" not in accounts
    for number in range(200):
        pushed(queues, ticket(tenant=str(number), tokens=number))
        popped(queues)
        assert len(queues._by_class["default"]._tenants) <= 5


# -- within a tenant --------------------------------------------------------------------------------------------------


def test_earliest_deadline_first_then_age_then_arrival() -> None:
    queues = Queues(ONE)
    late, soon, next_, booked, last = pushed(
        queues,
        ticket(deadline=30.0),
        ticket(deadline=10.0),
        ticket(deadline=20.0),
        ticket(deadline=20.0, since=-5.0),
        ticket(deadline=30.0),
    )
    assert popped(queues) == [soon, booked, next_, late, last]


def test_front_goes_before_those_who_came_earlier_and_is_not_charged_again() -> None:
    queues = Queues({"default": TrafficClass(), "batch": TrafficClass()})
    pushed(queues, *(ticket(tenant=name) for name in "ab" for _ in range(3)), *(ticket("batch") for _ in range(3)))
    first = popped(queues, 3)
    assert tenants(first) == "atb"
    (moved,) = pushed(queues, ticket(tenant="a", deadline=NEVER), front=True)
    order = popped(queues, 5)
    assert order[1] is moved
    assert tenants(order) == "taatb", "neither tenant nor class paid for what had been paid"


def test_remove_from_the_middle_keeps_the_counts() -> None:
    queues = Queues(CLASSES)
    tickets = pushed(queues, *(ticket("default", tokens) for tokens in (1, 2, 4)))
    queues.remove(tickets[1])
    assert not tickets[1].waiting
    assert (len(queues), queues.tokens("default"), queues.length("default")) == (2, 5, 2)
    assert list(queues) == [tickets[0], tickets[2]]
    assert popped(queues) == [tickets[0], tickets[2]]


def test_what_is_removed_is_not_kept() -> None:
    queues = Queues(ONE)
    pushed(queues, ticket(deadline=1.0), ticket(tenant="first", tokens=1))
    for number in range(200):
        queues.remove(*pushed(queues, ticket(deadline=500.0 + number)))
        queues.remove(*pushed(queues, ticket(tenant=f"t{number}")))
    line = queues._by_class["default"]
    assert len(line._tenants["t"].order) < 20
    assert len(line._turns) < 25


# -- room -------------------------------------------------------------------------------------------------------------

BOUNDED = {
    "interactive": TrafficClass(max_queue=2),
    "default": TrafficClass(max_queue=3),
    "batch": TrafficClass(max_queue=4),
}


@pytest.mark.parametrize(
    ("waiting", "newcomer", "words"),
    [
        ([], ticket("interactive"), None),
        ([("interactive", 1)], ticket("interactive", 999), None),
        ([("interactive", 1)] * 2, ticket("interactive"), "2 calls"),
        ([("interactive", 1)] * 2, ticket("batch"), None),
        ([("default", 10**6)] * 2, ticket("default", 10**6), None),
        ([("interactive", 1)] * 8, ticket("default"), None),
        ([("interactive", 1)] * 9, ticket("default"), "3 calls"),
    ],
)
def test_room(waiting: list[tuple[str, int]], newcomer: Ticket, words: str | None) -> None:
    queues = Queues(BOUNDED)
    pushed(queues, *(ticket(name, tokens) for name, tokens in waiting))
    assert queues.room(newcomer.call) == words


@pytest.mark.parametrize(
    ("newcomer", "victim"),
    [
        (ticket("interactive"), 7),
        (ticket("interactive", 5), 7),
        (ticket("default"), 7),
        (ticket("batch"), None),
    ],
)
def test_the_newest_of_the_least_important_gives_way(newcomer: Ticket, victim: int | None) -> None:
    queues = Queues({**BOUNDED, "batch": TrafficClass(max_queue=3)})
    tickets = pushed(
        queues, *(ticket(name) for name in ("interactive", "interactive", "default", "default", "default")),
        *(ticket("batch") for _ in range(3)),
    )  # fmt: skip
    pushed(queues, ticket("batch"), front=True)
    assert queues.room(newcomer.call)
    assert queues.victim(newcomer.call) is (None if victim is None else tickets[victim])


def test_nobody_gives_way_while_there_is_room_or_for_a_class_that_never_waits() -> None:
    queues = Queues({"now": TrafficClass(max_queue=0), **BOUNDED})
    pushed(queues, ticket("batch"))
    assert queues.victim(ticket("interactive").call) is None
    assert queues.room(ticket("now").call) == "0 calls"
    assert queues.victim(ticket("now").call) is None


def test_newcomers_do_not_take_the_places_of_calls_that_return_for_their_bookings() -> None:
    queues = Queues(BOUNDED)
    pushed(queues, *[ticket("interactive") for _ in range(4)], *[ticket("batch", 120) for _ in range(4)])
    back = ticket("interactive", 400)
    assert queues.room(back.call) == "2 calls"
    assert queues.room(back.call, promised=True) is None, "four newcomers wait in places that other classes lent"
    back.promised = True
    pushed(queues, back)
    assert queues.room(ticket("interactive", 600).call, promised=True) is None
    second = Ticket(ticket("interactive").call, 0.0, promised=True)
    pushed(queues, second)
    assert queues.room(ticket("interactive").call, promised=True) == "2 calls"
    queues.remove(second)
    assert queues.room(ticket("interactive").call, promised=True) is None
    assert queues.promised_tokens("interactive") == 400


def test_a_call_that_returned_for_its_booking_is_not_pushed_out() -> None:
    queues = Queues({**BOUNDED, "batch": TrafficClass(max_queue=3)})
    pushed(queues, *(ticket(name) for name in ("interactive", "interactive", "default", "default", "default")))
    (newcomer,) = pushed(queues, ticket("batch"))
    pushed(queues, *[Ticket(ticket("batch").call, 0.0, promised=True) for _ in range(3)])
    assert queues.victim(ticket("interactive").call) is newcomer
    queues.remove(newcomer)
    assert queues.victim(ticket("interactive").call) is not None
    assert queues.victim(ticket("interactive").call).call.class_name == "default"  # type: ignore[union-attr]


# -- estimates --------------------------------------------------------------------------------------------------------


def test_ahead_of_a_newcomer_is_what_goes_first() -> None:
    queues = Queues({"first": TrafficClass(strict=True), **CLASSES, "last": TrafficClass(weight=1000)})
    assert ahead(queues, ticket().call) == 0
    pushed(queues, *(ticket("first") for _ in range(7)))
    assert ahead(queues, ticket("first").call) == 700
    assert ahead(queues, ticket("first", deadline=999.0).call) == 0
    assert ahead(queues, ticket("first", tenant="new").call) == 100, "one turn of the other tenant's"
    assert ahead(queues, ticket().call) == 700
    queues.remove(*pushed(queues, ticket()))
    assert ahead(queues, ticket().call) == 700, "a tenant that is known and does not wait"
    pushed(queues, *(ticket() for _ in range(8)))
    pushed(queues, *(ticket("interactive") for _ in range(90)))
    assert ahead(queues, ticket().call) == 700 + 800 + 1700, "the more important go first among equals"
    assert ahead(queues, ticket("interactive", deadline=1.0).call) == 700
    assert ahead(queues, ticket("interactive").call) == 700 + 9000 + 800, "no more than there is"


def test_ahead_of_a_newcomer_whose_class_was_away() -> None:
    queues = Queues(CLASSES)
    pushed(queues, *(ticket() for _ in range(90)))
    popped(queues, 40)
    assert ahead(queues, ticket("batch").call) == 100
    assert ahead(queues, ticket("interactive").call) == 0


def test_ahead_of_a_ticket_that_waits() -> None:
    queues = Queues(CLASSES)
    tickets = pushed(queues, *(ticket(deadline=100.0 - number) for number in range(10)))
    assert [ahead(queues, each.call, each) for each in tickets] == [900.0 - 100 * number for number in range(10)]
    (moved,) = pushed(queues, ticket(), front=True)
    assert ahead(queues, moved.call, moved) == 0
    assert ahead(queues, tickets[9].call, tickets[9]) == 100
    queues.remove(tickets[9])
    queues.remove(tickets[5])
    assert ahead(queues, tickets[0].call, tickets[0]) == 800


def test_ahead_looks_at_a_sample_of_a_long_queue() -> None:
    rng = random.Random(3)
    queues = Queues(ONE)
    for number in rng.sample(range(4000), 4000):
        pushed(queues, ticket(tokens=rng.randint(50, 150), deadline=1000.0 + number))
    for earlier in (0, 500, 2000, 3500, 4000):
        guess = ahead(queues, ticket(deadline=999.5 + earlier).call)
        assert guess == pytest.approx(100 * earlier, abs=8000)


def test_calls_without_tokens_count_nothing() -> None:
    queues = Queues(CLASSES)
    pushed(queues, *(ticket(name, 0, tenant=tenant) for name in CLASSES for tenant in "ab"))
    assert ahead(queues, ticket().call) == 0
    assert ahead(queues, ticket(deadline=1.0).call) == 0
    assert len(popped(queues)) == 6


# -- reload -----------------------------------------------------------------------------------------------------------


def test_after_a_reload_the_new_weights_hold_and_old_debts_stay() -> None:
    queues = Queues({"default": TrafficClass(), "batch": TrafficClass()}, {"a": 1.0})
    for name in ("default", "batch"):
        pushed(queues, *(ticket(name, tenant=tenant) for tenant in "ab" for _ in range(60)))
    assert [each.call.class_name for each in popped(queues, 3)] == ["default", "batch", "default"]
    queues.apply({"default": TrafficClass(weight=3), "batch": TrafficClass()}, {"a": 3.0})
    served = popped(queues, 40)
    assert Counter(each.call.class_name for each in served)["default"] in (29, 30)
    assert Counter(each.call.tenant for each in served if each.call.class_name == "default")["a"] in (21, 22)
    assert queues.classes["default"].weight == 3


def test_a_debt_is_the_same_number_of_tokens_under_another_weight() -> None:
    queues = Queues({"default": TrafficClass(), "batch": TrafficClass()})
    pushed(queues, ticket(tokens=1000), *(ticket() for _ in range(9)), *(ticket("batch") for _ in range(40)))
    popped(queues, 1)
    queues.apply({"default": TrafficClass(weight=2), "batch": TrafficClass()}, {})
    names = [each.call.class_name for each in popped(queues, 8)]
    assert names == ["batch"] * 5 + ["default", "batch", "default"]


def test_so_is_a_tenants() -> None:
    queues = Queues(ONE)
    pushed(queues, ticket(tenant="a", tokens=1000), ticket(tenant="b", tokens=600))
    pushed(queues, *(ticket(tenant=name) for name in "abc" for _ in range(9)))
    assert tenants(popped(queues, 3)) == "abc"
    queues.apply(ONE, {"a": 3.0})
    assert tenants(popped(queues, 8)) == "cccacaaa", "a owed 900 more than c: 300 with its new weight"


def test_tickets_of_a_class_that_is_gone_move_to_default_by_their_deadlines() -> None:
    queues = Queues(CLASSES)
    first, last = pushed(queues, ticket(deadline=10.0), ticket(deadline=30.0))
    (moved,) = pushed(queues, ticket("batch", deadline=20.0))
    queues.apply({"default": TrafficClass(), "new": TrafficClass(strict=True)}, {})
    assert moved.call.class_name == "default"
    assert (len(queues), queues.length("default"), queues.length("new"), queues.tokens("default")) == (3, 3, 0, 300)
    assert popped(queues) == [first, moved, last]
    assert list(queues.classes) == ["default", "new"]


def test_a_class_that_was_strict_is_not_in_debt_to_those_it_went_before() -> None:
    strict = {"first": TrafficClass(strict=True), "default": TrafficClass()}
    queues = Queues(strict)
    pushed(queues, *(ticket("first") for _ in range(90)), *(ticket() for _ in range(90)))
    popped(queues, 50)
    queues.apply({name: TrafficClass() for name in strict}, {})
    assert Counter(each.call.class_name for each in popped(queues, 20)) == {"first": 10, "default": 10}


def test_what_is_ahead_of_a_call_in_its_own_class_and_the_share_its_class_has() -> None:
    queues = Queues({
        "first": TrafficClass(strict=True),
        "interactive": TrafficClass(weight=3),
        "default": TrafficClass(weight=1),
    })  # fmt: skip
    one = a_call(class_name="default", prompt_tokens=100)
    assert queues.own_ahead(one) == (0.0, 1.0), "nobody competes"
    assert queues.passing("default") == {"first": math.inf, "interactive": 3.0}
    ticket = Ticket(a_call(class_name="default", prompt_tokens=70), 0.0)
    queues.push(ticket)
    queues.push(Ticket(a_call(class_name="interactive", prompt_tokens=500), 0.0))
    assert queues.own_ahead(one) == (70.0, 0.25)
    assert list(queues.passing("default")) == ["first"], "of whom nobody waits"
    assert queues.own_ahead(ticket.call, ticket) == (0.0, 0.25)
    first = Ticket(a_call(class_name="first", prompt_tokens=5), 0.0)
    queues.push(first)
    assert queues.own_ahead(one) == (70.0, 0.0), "a strict class goes first"
    assert queues.own_ahead(first.call) == (5.0, 1.0), "and shares with nobody"


def test_what_a_tenant_was_served_can_be_read_and_is_nothing_where_nobody_knows_him() -> None:
    queues = Queues(CLASSES)
    pushed(queues, ticket(tokens=100, tenant="a"))
    popped(queues)
    assert queues.served("default", "a") > 0.0
    assert queues.served("default", "b") == 0.0
    assert queues.served("gone", "a") == 0.0


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_calls_that_were_set_aside_are_passed() -> None:
    """Within their tenant first, then by the next tenant in turn, and by later classes."""
    queues = Queues(CLASSES)
    aside, next_one = pushed(queues, ticket(tenant="a"), ticket(tenant="a"))
    other, least = pushed(queues, ticket(tenant="b"), ticket("batch"))

    def but(*those: Ticket) -> Any:
        def fits(looked_at: Ticket) -> bool:
            looked_at.aside = looked_at in those
            return not looked_at.aside

        return fits

    assert queues.pop(but(aside, next_one, other), 0.0) is least
    (least,) = pushed(queues, ticket("batch"))
    assert queues.pop(but(aside), 0.0) is next_one
    assert queues.pop(but(aside), 0.0) is other
    assert queues.pop(but(aside), 0.0) is least
    assert queues.pop(but(aside), 0.0) is None
    assert queues.pop(yes, 0.0) is aside
    assert queues.served("default", "a") == queues.served("default", "b") * 2


def test_one_that_does_not_fit_is_not_passed_behind_those_set_aside() -> None:
    queues = Queues(ONE)
    aside, head, _ = pushed(queues, ticket(), ticket(), ticket())
    seen: list[Ticket] = []

    def fits(looked_at: Ticket) -> bool:
        seen.append(looked_at)
        looked_at.aside = looked_at is aside
        return False

    assert queues.pop(fits, 0.0) is None
    assert seen == [aside, head]
