"""Properties of queues under random schedules: fairness, shares, order, work conservation, no call lost or doubled."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.admission.queues import Queues, Ticket
from gateway.core.admission.ticket import OUTPUT_WEIGHT
from gateway.core.policy.traffic import TrafficClass
from tests.calls import a_call, ahead
from tests.examples import examples

NAMES = ("interactive", "default", "batch")
TENANTS = "abcd"
FAR = 1e9  # a deadline so late that nothing starves
seeds = st.integers(0, 2**32 - 1)


def yes(_: Ticket) -> bool:
    return True


# -- tenants: VTC's bound ---------------------------------------------------------------------------------------------


class Engine:
    """`size` tokens that run at a time. What a tenant is served is told by what left the queue and by real usage, not
    by the queue's own counters."""

    def __init__(self, rng: random.Random, corrected: bool) -> None:
        self.rng = rng
        self.corrected = corrected
        self.size = rng.randint(40, 2000)
        self.largest = rng.randint(1, self.size)  # of a call, prompt and output, estimated and real
        self.charged = 0  # the largest of all charges
        self.weights = {name: rng.choice([0.25, 1.0, 1.0, 3.0]) for name in TENANTS}
        self.queues = Queues({"default": TrafficClass()}, self.weights)
        self.running: list[tuple[Ticket, int, int]] = []
        self.used = 0
        self.served = dict.fromkeys(TENANTS, 0.0)
        self.waiting: Counter[str] = Counter()

    def arrival(self, tenant: str) -> None:
        prompt = self.rng.randint(1, self.largest)
        output = self.rng.randint(0, self.largest - prompt)
        call = a_call(tenant=tenant, prompt_tokens=prompt, output_tokens=output, deadline=FAR)
        self.queues.push(Ticket(call, 0.0))
        self.waiting[tenant] += 1

    def start(self) -> bool:
        ticket = self.queues.pop(lambda each: self.used + self.largest <= self.size, 0.0)
        if ticket is None:
            return False
        prompt, output = ticket.call.prompt_tokens, ticket.call.output_tokens
        if self.corrected:
            prompt = self.rng.randint(0, self.largest)
            output = self.rng.randint(0, self.largest - prompt)
        self.used += max(ticket.cost, prompt + output)
        self.running.append((ticket, prompt, output))
        tenant = ticket.call.tenant
        self.served[tenant] += ticket.charge / self.weights[tenant]
        self.charged = max(self.charged, ticket.charge)
        self.waiting[tenant] -= 1
        return True

    def end(self) -> None:
        ticket, prompt, output = self.running.pop(self.rng.randrange(len(self.running)))
        self.used -= max(ticket.cost, prompt + output)
        tenant = ticket.call.tenant
        self.served[tenant] += (prompt + OUTPUT_WEIGHT * output - ticket.charge) / self.weights[tenant]
        self.queues.correct(ticket, prompt, output)

    def bound(self) -> float:
        """2U. With estimates alone U is the largest charge over the smallest weight; with real usage it is
        max(w_in x L_in, w_out x M) over the smallest weight of the two, M being what runs at a time."""
        most = max(self.largest, OUTPUT_WEIGHT * self.size) if self.corrected else self.charged
        return 2.0 * most / min(self.weights["a"], self.weights["b"])


def worst_gap(seed: int, corrected: bool) -> tuple[float, float]:
    """The largest change of W_a/w_a - W_b/w_b between any two moments of one random schedule, and its bound.

    a and b always wait; c and d come and go.
    """
    rng = random.Random(seed)
    engine = Engine(rng, corrected)
    for _ in range(rng.randrange(20)):  # a past in which a and b are no equals
        engine.arrival(rng.choice("acd"))
        engine.start()
    gaps: list[float] = []
    for _ in range(60):
        for tenant in "ab":
            while engine.waiting[tenant] < 2:
                engine.arrival(tenant)
        gaps.append(engine.served["a"] - engine.served["b"])
        if rng.random() < 0.4:
            engine.arrival(rng.choice("cd"))
        if rng.random() < 0.7:
            engine.start()
            gaps.append(engine.served["a"] - engine.served["b"])
        elif engine.running:
            engine.end()
    return max(gaps) - min(gaps), engine.bound()


@pytest.mark.parametrize("corrected", [False, True])
def test_two_tenants_that_wait_are_served_alike(corrected: bool) -> None:
    for seed in range(150):
        gap, bound = worst_gap(seed, corrected)
        assert gap <= bound * (1 + 1e-9), seed


@pytest.mark.slow
@pytest.mark.parametrize("corrected", [False, True])
def test_two_tenants_that_wait_are_served_alike_in_thousands_of_schedules(corrected: bool) -> None:
    for seed in range(3_000):
        gap, bound = worst_gap(seed, corrected)
        assert gap <= bound * (1 + 1e-9), seed


# -- classes: shares --------------------------------------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(seeds)
def test_two_classes_that_wait_differ_by_one_call_of_each(seed: int) -> None:
    rng = random.Random(seed)
    largest = {name: rng.randint(1, 900) for name in NAMES}
    classes = {name: TrafficClass(weight=rng.choice([0.5, 1.0, 4.0, 8.0])) for name in NAMES}
    queues = Queues(classes)
    served = dict.fromkeys(NAMES, 0.0)
    shares: list[dict[str, float]] = [served.copy()]
    for _ in range(100):
        for name in NAMES:
            while queues.length(name) < (rng.random() < 0.2 if name == "batch" else 2):  # batch comes and goes
                call = a_call(class_name=name, prompt_tokens=rng.randint(1, largest[name]), deadline=FAR)
                queues.push(Ticket(call, 0.0))
        popped = queues.pop(yes, 0.0)
        assert popped is not None
        served[popped.call.class_name] += popped.cost / classes[popped.call.class_name].weight
        shares.append(served.copy())
    gaps = [each["interactive"] - each["default"] for each in shares]
    bound = sum(largest[name] / classes[name].weight for name in ("interactive", "default"))
    assert max(gaps) - min(gaps) <= bound * (1 + 1e-9)


# -- order, work conservation, nothing lost ---------------------------------------------------------------------------


class Model:
    """A random life of one queue, beside a list of what should be in it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.largest = self.rng.randint(1, 900)
        self.queues = Queues(self.policy(), {"a": 2.0})
        self.now = 0.0
        self.inside: list[Ticket] = []
        self.outside: list[Ticket] = []
        self.popped: list[Ticket] = []

    def policy(self) -> dict[str, TrafficClass]:
        return {
            name: TrafficClass(
                weight=self.rng.choice([1.0, 8.0]),
                strict=self.rng.random() < 0.2,
                reserve=self.rng.choice([0.0, 0.0, 0.1]),
            )
            for name in NAMES
            if name == "default" or self.rng.random() < 0.8
        }

    def step(self) -> None:
        self.now += self.rng.choice([0.0, 0.0, 0.1, 3.0])
        steps = [self.push] * 6 + [self.again] + [self.pop] * 4 + [self.remove, self.correct]
        self.rng.choice(steps if self.rng.random() < 0.98 else [self.reload])()
        queues, inside = self.queues, self.inside
        assert Counter(queues) == Counter(inside)
        assert len(queues) == len(inside)
        assert queues.total_tokens == sum(each.cost for each in inside)
        for name in queues.classes:
            own = [each for each in inside if each.call.class_name == name]
            assert (queues.length(name), queues.tokens(name)) == (len(own), sum(each.cost for each in own))
        assert all(each.waiting for each in inside)
        assert not any(each.waiting for each in self.outside)

    def push(self) -> None:
        call = a_call(
            class_name=self.rng.choice(list(self.queues.classes)),
            tenant=self.rng.choice(TENANTS),
            prompt_tokens=self.rng.randint(0, self.largest),
            output_tokens=self.rng.randint(0, 200),
            deadline=self.now + self.rng.choice([1.0, 10.0, 60.0]),
        )
        since, large = self.now - self.rng.choice([0.0, 0.0, 2.0]), call.cost > self.largest
        self.inside.append(Ticket(call, self.now, since=since, large=large))
        self.queues.push(self.inside[-1])

    def again(self) -> None:
        """A call that had been granted and lost its engine."""
        known = [each for each in self.popped if each.call.class_name in self.queues.classes]
        if known:
            self.inside.append(Ticket(self.rng.choice(known).call, self.now))
            self.queues.push(self.inside[-1], front=True)

    def pop(self) -> None:
        size = self.rng.randint(0, 1100)
        paused = {name for name in NAMES if self.rng.random() < 0.1}
        heads = [each for each in self.queues.heads(self.now) if each.call.class_name not in paused]
        assert {each.call.class_name for each in heads} == {each.call.class_name for each in self.inside} - paused
        for head in heads:
            rivals = [each for each in self.inside if self.line(each) == self.line(head)]
            assert head is min(rivals, key=lambda each: each.key)
        ticket = self.queues.pop(lambda each: each.cost <= size, self.now, paused)
        if ticket is None:
            fits = any(each.cost <= size for each in heads)
            assert not fits or any(self.starves(each) or not each.large for each in heads if each.cost > size)
            return
        assert ticket in heads
        assert ticket.cost <= size
        reserved = self.queues.classes[ticket.call.class_name].reserve
        assert reserved or all(each.large for each in heads[: heads.index(ticket)])
        self.leave(ticket)
        self.popped.append(ticket)

    @staticmethod
    def line(ticket: Ticket) -> tuple[str, str]:
        return ticket.call.class_name, ticket.call.tenant

    def starves(self, ticket: Ticket) -> bool:
        return self.now - ticket.since > (ticket.call.deadline - ticket.since) / 2

    def remove(self) -> None:
        if self.inside:
            ticket = self.rng.choice(self.inside)
            self.queues.remove(ticket)
            self.leave(ticket)

    def leave(self, ticket: Ticket) -> None:
        self.inside.remove(ticket)
        self.outside.append(ticket)

    def correct(self) -> None:
        if self.outside:
            self.queues.correct(self.rng.choice(self.outside), self.rng.randint(0, 2000), self.rng.randint(0, 2000))

    def reload(self) -> None:
        policy = self.policy()
        self.queues.apply(policy, {name: self.rng.choice([0.5, 1.0, 4.0]) for name in TENANTS})
        assert list(self.queues.classes) == list(policy)
        assert all(each.call.class_name in policy for each in self.inside)


@settings(max_examples=examples(40))
@given(seeds)
def test_whatever_happens_order_is_kept_and_nothing_is_lost_or_twice(seed: int) -> None:
    model = Model(seed)
    for _ in range(80):
        model.step()
    left = [model.queues.pop(yes, model.now) for _ in range(len(model.inside))]
    assert Counter(left) == Counter(model.inside)
    assert (len(model.queues), model.queues.total_tokens) == (0, 0)


@pytest.mark.slow
def test_a_long_life() -> None:
    for seed in range(3):
        model = Model(seed)
        for _ in range(2000):
            model.step()


# -- room -------------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(seeds)
def test_places_may_be_lent_but_not_made(seed: int) -> None:
    rng = random.Random(seed)
    classes = {name: TrafficClass(max_queue=rng.randint(1, 6)) for name in NAMES}
    queues = Queues(classes)
    order = list(classes)
    most = sum(each.max_queue for each in classes.values())
    for _ in range(150):
        if rng.random() < 0.3:
            queues.pop(yes, 0.0)
        call = a_call(class_name=rng.choice(NAMES), prompt_tokens=rng.randint(1, 60), deadline=FAR)
        name, rank = call.class_name, order.index(call.class_name)
        words, victim = queues.room(call), queues.victim(call)
        if words is None:
            assert victim is None
            assert queues.length(name) < classes[name].max_queue
        elif victim is None:
            over = [each for each in order[: rank + 1] if queues.length(each) >= classes[each].max_queue]
            assert over, "else it has a place, and whoever took it gives way"
            continue
        else:
            assert order.index(victim.call.class_name) > rank
            more = queues.length(name) >= classes[name].max_queue
            below = [
                each
                for each in queues
                if order.index(each.call.class_name) > order.index(victim.call.class_name)
                and not (more and 2 * queues.length(each.call.class_name) <= classes[each.call.class_name].max_queue)
            ]
            assert not below, "the least important first"
            queues.remove(victim)
        queues.push(Ticket(call, 0.0))
        assert len(queues) <= most


# -- estimates --------------------------------------------------------------------------------------------------------


def backlog(rng: random.Random, largest: int, smallest: int) -> Queues:
    """A queue some way into its life; its classes are weighted, at times in bands."""
    classes = {
        name: TrafficClass(weight=rng.choice([1.0, 2.0, 8.0]), strict=rng.random() < 0.2) for name in (*NAMES, "last")
    }
    queues = Queues(classes, {"a": 2.0, "b": 0.5})
    for _ in range(rng.randrange(120)):
        call = a_call(
            class_name=rng.choice(list(classes)),
            tenant=rng.choice(TENANTS),
            prompt_tokens=rng.randint(smallest, largest),
            deadline=FAR + rng.randrange(50),
        )
        queues.push(Ticket(call, 0.0))
        if rng.random() < 0.3:
            queues.pop(yes, 0.0)
    return queues


def went_first(queues: Queues, ticket: Ticket) -> Iterator[Ticket]:
    while (popped := queues.pop(yes, 0.0)) is not ticket:
        assert popped is not None
        yield popped


@pytest.mark.parametrize(("smallest", "calls"), [(100, 1), (1, 2)])
def test_ahead_is_what_goes_first(smallest: int, calls: int) -> None:
    """With calls of one size, within one call per other tenant of its class, and in other classes within their share of
    that and one call each; with calls of any size, within twice as many. And right on average."""
    errors = []
    for seed in range(150):
        rng = random.Random(seed)
        queues = backlog(rng, 100, smallest)
        classes = queues.classes
        name, tenant = rng.choice(list(classes)), rng.choice(TENANTS)
        call = a_call(class_name=name, tenant=tenant, prompt_tokens=100, deadline=FAR + rng.randrange(50))
        guess, (guess_in_class, _) = ahead(queues, call), queues.own_ahead(call)
        rivals = {each.call.tenant for each in queues if each.call.class_name == name} - {tenant}
        ticket = Ticket(call, 0.0)
        queues.push(ticket)
        assert ahead(queues, ticket.call, ticket) == pytest.approx(guess)
        truth: Counter[str] = Counter()
        for each in went_first(queues, ticket):
            truth[each.call.class_name] += each.cost
        bound = 100 * calls * len(rivals)
        assert abs(guess_in_class - truth[name]) <= bound
        others = sum(100 * calls + bound * each.weight / classes[name].weight for each in classes.values())
        assert abs(guess - truth.total()) <= bound + others
        errors.append(guess - truth.total())
    assert abs(sum(errors)) / len(errors) < 50, "half a call"
