"""Laws of money: no budget is exceeded, no money is forgotten by a gateway that is killed, every reservation ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.core.admission.quotas import DAY, Calendar, bounds
from gateway.core.money.book import MoneyBook, Spending, Spent
from tests.core.money.test_money import NOON, NOW, call, policy
from tests.examples import examples

POLICY = policy("[0.05/day, 0.12/month, 60%/tenant]")
TENANTS = ("acme", "other")
NUMBERS = st.integers(-10, 4000)


@dataclass
class Outside:
    """A call that has left the house, as the provider knows it: `cost` is what it will take at most."""

    spending: Spending
    tenant: str
    cost: int
    at: float


@dataclass
class Bills:
    """Money that the provider has taken or may take, by the tenant and the time at which the call went out."""

    settled: list[tuple[str, int, float]] = field(default_factory=list)
    open: list[Outside] = field(default_factory=list)


class Money(RuleBasedStateMachine):
    """A gateway that reserves, settles, writes, is killed and ends, over days."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.kept: dict[tuple[str, ...], Spent] = {}
        self.bills = Bills()
        self.lost: list[Outside] = []  # of gateways that were killed
        self.begins()

    def begins(self) -> None:
        self.book = MoneyBook(POLICY, Calendar(NOON - NOW))
        self.book.restore(self.kept.values(), self.now, kept=True)

    @rule(prompt=st.integers(0, 4000), output=st.integers(0, 4000), tenant=st.sampled_from(TENANTS))
    def sends(self, prompt: int, output: int, tenant: str) -> None:
        made = call(prompt, output, tenant=tenant)
        if self.book.may_spend("cloud", made, self.now):
            spending = self.book.reserve("cloud", made, self.now)
            self.bills.open.append(Outside(spending, tenant, spending.reserved, self.now))

    @precondition(lambda self: self.bills.open)
    @rule(
        which=st.integers(0, 10**6),
        usage=st.none() | st.tuples(NUMBERS, NUMBERS, NUMBERS),
        tokens=st.none() | NUMBERS,
        unbilled=st.booleans(),
    )
    def ends(self, which: int, usage: tuple[int, int, int] | None, tokens: int | None, unbilled: bool) -> None:
        outside = self.bills.open.pop(which % len(self.bills.open))
        spending = outside.spending
        spending.usage, spending.tokens, spending.unbilled = usage, tokens, unbilled
        before = self.book.totals.get(("cloud", outside.tenant, "mini"), (0, 0))[0]
        spending.end(self.now)
        cost = self.book.totals["cloud", outside.tenant, "mini"][0] - before
        assert 0 <= cost <= outside.cost
        self.bills.settled.append((outside.tenant, cost, outside.at))

    @rule()
    def writes(self) -> None:
        states = self.book.states(self.now)
        self.put(states)
        self.book.keep(states)

    @rule()
    def is_killed(self) -> None:
        """Of what is outside nobody will ever tell: it may cost all that was reserved."""
        self.lost += self.bills.open
        self.bills.open.clear()
        self.begins()

    @rule()
    def goes(self) -> None:
        self.book.known = False
        self.put(self.book.states(self.now, last=True))
        self.is_killed()

    @rule(seconds=st.sampled_from((1.0, DAY / 3, 2.0 * DAY)))
    def passes(self, seconds: float) -> None:
        self.now += seconds

    def put(self, states: list[Spent]) -> None:
        self.kept |= {(each.provider, each.tenant, each.model, each.span, str(each.start)): each for each in states}

    @invariant()
    def no_budget_is_exceeded(self) -> None:
        for _, _, purse in self.book.purses():
            window = purse.window
            assert window.amount is not None
            assert window.used(self.now) + window.reserved <= window.amount

    @invariant()
    def no_money_is_forgotten(self) -> None:
        """The book has as much spent and reserved as the provider may take in the window, or more."""
        for _, tenant, purse in self.book.purses():
            start, end = bounds(purse.window.span, self.now + NOON - NOW)
            known = purse.window.used(self.now) + purse.window.reserved
            bills = [(who, cost, at) for who, cost, at in self.bills.settled]
            bills += [(each.tenant, each.cost, each.at) for each in self.lost]
            taken = sum([cost for who, cost, at in bills if tenant in ("", who) and start <= at + NOON - NOW < end])
            assert known >= taken + sum([each.cost for each in self.bills.open if tenant in ("", each.tenant)])

    def teardown(self) -> None:
        for each in self.bills.open:
            each.spending.end(self.now)
        assert all(purse.window.reserved == 0 for _, _, purse in self.book.purses())


TestMoney = pytest.mark.slow(Money.TestCase)
TestMoney.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
