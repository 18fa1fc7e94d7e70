"""The order between and within classes."""

from __future__ import annotations

import random
from collections import Counter

from gateway.core.policy import TrafficClass
from gateway.core.queues import Queues, Ticket
from tests.calls import a_call

CLASSES = {"interactive": TrafficClass(weight=8), "default": TrafficClass(weight=4), "batch": TrafficClass(weight=1)}


def ticket(class_name: str, tokens: int = 100, at: float = 0.0, deadline: float = 1000.0) -> Ticket:
    call = a_call(class_name=class_name, arrived=at, deadline=deadline, prompt_tokens=tokens)
    return Ticket(call, at)


def yes(_: Ticket) -> bool:
    return True


def test_first_come_first_served_within_a_class() -> None:
    queues = Queues(CLASSES)
    tickets = [ticket("default") for _ in range(5)]
    for t in tickets:
        queues.push(t)
    assert [queues.pop(yes, 0.0) for _ in range(5)] == tickets
    assert queues.pop(yes, 0.0) is None
    assert (len(queues), queues.total_tokens) == (0, 0)


def test_front_goes_before_those_who_came_earlier() -> None:
    queues = Queues(CLASSES)
    first, moved = ticket("default"), ticket("default")
    queues.push(first)
    queues.push(moved, front=True)
    assert queues.pop(yes, 0.0) is moved


def test_backlogged_classes_share_tokens_by_weight_within_one_call() -> None:
    rng = random.Random(7)
    queues = Queues(CLASSES)
    largest = 500
    for name in CLASSES:
        for _ in range(3000):
            queues.push(ticket(name, rng.randint(1, largest)))
    served: Counter[str] = Counter()
    for _ in range(2000):
        popped = queues.pop(yes, 0.0)
        assert popped is not None
        served[popped.call.class_name] += popped.cost
        shares = [served[name] / settings.weight for name, settings in CLASSES.items()]
        assert max(shares) - min(shares) <= largest / 1 + largest / 4


def test_an_idle_class_saves_no_credit() -> None:
    queues = Queues(CLASSES)
    for _ in range(1000):
        queues.push(ticket("default"))
    for _ in range(500):
        queues.pop(yes, 0.0)
    for _ in range(100):
        queues.push(ticket("interactive"))
    first = [queues.pop(yes, 0.0) for _ in range(30)]
    names = Counter(t.call.class_name for t in first if t)
    assert names["default"] >= 9, "a class just back must not take more than its share (8 of 12)"


def test_a_head_that_does_not_fit_lets_others_pass_until_half_its_time() -> None:
    queues = Queues(CLASSES)
    large = ticket("interactive", 1000, at=0.0, deadline=10.0)
    small = ticket("batch", 1, at=0.0)
    queues.push(large)
    queues.push(small)

    def fits(t: Ticket) -> bool:
        return t.cost < 100

    assert queues.pop(fits, 5.1) is None, "past half of its time nothing passes it"
    assert queues.pop(fits, 4.9) is small
    assert len(queues) == 1


def test_remove_from_the_middle_keeps_the_counts() -> None:
    queues = Queues(CLASSES)
    tickets = [ticket("default", tokens) for tokens in (1, 2, 4)]
    for t in tickets:
        queues.push(t)
    queues.remove(tickets[1])
    assert not tickets[1].waiting
    assert (len(queues), queues.tokens("default"), queues.length("default")) == (2, 5, 2)
    assert list(queues) == [tickets[0], tickets[2]]
