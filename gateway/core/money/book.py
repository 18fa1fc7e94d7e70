"""Money that calls cost. To providers: reserved at the highest cost before a call goes out, settled by real usage. On
own engines: a share of their time.

A provider has a budget a day and a month, and a tenant its share of both. What is spent and reserved together never
exceeds one of them. Amounts are integers, micro-units of the currency. Windows and calendar are those of token quotas.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.core.admission.quotas import SPANS, Calendar, QuotaWindow, Span, Used
from gateway.core.money.engine_time import EngineMeters, EngineTime, Payer
from gateway.core.money.purse import NO_WINDOW, Purse
from gateway.core.money.tariff import MICRO, Tariff
from gateway.core.policy.policy import Policy
from gateway.core.request.call import Call

Key = tuple[str, str]  # provider and tenant; "": all of the provider's together
LineKey = tuple[str, str, str, Span]  # payer and window


def _unheard() -> None:
    """Do nothing: the default if nothing listens."""


class Spent(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Window of money to keep. With a `model`, `micro` and `tokens` are those used. Without, `micro` is the mark of a
    budget: the provider's, or the tenant's share of it. `start`: Unix time."""

    provider: str
    tenant: str
    model: str
    span: Span
    start: Annotated[int, Meta(ge=-(2**53), le=2**53)]
    micro: Annotated[int, Meta(ge=0, le=2**62)]
    tokens: Annotated[int, Meta(ge=0, le=2**62)]


class Spending(msgspec.Struct, eq=False):
    """Reservation of one attempt's highest cost. It ends once, by `end`: at the usage that was reported, else at what
    can have been used, else at the highest cost.

    `usage`: prompt, cached and completion tokens, as reported for the whole answer. `tokens`: of prompt and answer, as
    estimated for one that was cut short. `unbilled`: the provider has refused the call, or never got it.
    """

    _book: MoneyBook
    _call: Call
    payer: Payer
    _tariff: Tariff
    _windows: tuple[QuotaWindow, ...]
    reserved: int
    usage: tuple[int, int, int] | None = None
    tokens: int | None = None
    unbilled: bool = False
    live: bool = True

    def reserve_in(self, windows: Iterable[QuotaWindow]) -> None:
        """Reserve the same amount in windows that a reload has added."""
        for window in windows:
            if window not in self._windows:
                window.carry(self.reserved)
                self._windows += (window,)

    def end(self, now: float) -> None:
        """Replace the reservation by the cost of the attempt. A second time changes nothing."""
        if not self.live:
            return
        self.live = False
        used = self._used()
        if used is None:  # nobody has told
            cost, tokens = self.reserved, self._call.prompt_tokens
        else:
            cost, tokens = min(self.reserved, self._tariff.cost(*used)), used[0] + used[2]
        for window in self._windows:
            window.settle(self.reserved, cost, now)
        self._book.ended(self)
        self._book.count(self.payer, cost, tokens, now)

    def _used(self) -> tuple[int, int, int] | None:
        """Tokens of the prompt, of it cached, and of the answer; None: not known, or the provider's numbers cannot
        be."""
        if self.unbilled:
            return 0, 0, 0
        if self.usage is not None:
            prompt, cached, completion = self.usage
            return self.usage if prompt > 0 and cached >= 0 and completion >= 0 else None
        if self.tokens is None or self.tokens < 0:
            return None
        prompt = self._call.prompt_tokens
        return prompt, 0, max(0, self.tokens - prompt)


class SpentLine:
    """Money and tokens of one tenant's calls for one model of a provider, in one kind of window."""

    def __init__(self, name: str, span: Span, calendar: Calendar) -> None:
        self.money = QuotaWindow(name, span, calendar)
        self.tokens = QuotaWindow(name, span, calendar)


class MoneyBook:
    """The money of every provider. `ahead`: nothing is spent beyond the marks that are kept.

    `known`: whether the amounts of the gateway before are here; until then nothing is spent. `short` is called when a
    mark is to be raised at once. `changed`: lines with other amounts than those that the storage has taken.
    """

    def __init__(self, policy: Policy, calendar: Calendar, *, ahead: bool = True) -> None:
        self._calendar = calendar
        self.ahead = ahead
        self.known = not ahead
        self.short: Callable[[], None] = _unheard
        self.in_store = False  # marks are kept by a cluster's store, not by this machine's storage
        self.meters = EngineMeters()
        self._tariffs: dict[str, Tariff] = {}
        self._of: dict[Key, tuple[Purse, ...]] = {}  # of the policy
        self._purses: dict[tuple[str, str, Span], Purse] = {}  # those of providers that are gone too
        self.lines: dict[LineKey, SpentLine] = {}
        self.changed: set[LineKey] = set()
        self._under_way: set[Spending] = set()
        self.totals: dict[Payer, tuple[int, int]] = {}  # micro-units and tokens since the start
        self.apply(policy)

    def __bool__(self) -> bool:
        """Whether any call costs money."""
        return bool(self._tariffs or self.meters.price)

    def apply(self, policy: Policy) -> None:
        """Apply another policy. Windows keep what is spent and reserved; new windows reserve for calls under way."""
        self.in_store = policy.cluster is not None
        self.meters.price = policy.engines_price
        self._tariffs = {name: provider.prices for name, provider in policy.providers.items()}
        self._of = {}
        for name, provider in policy.providers.items():
            share = provider.limit("tenant")
            for tenant in ("", *(() if share is None else provider.tenants)):
                found = []
                for span in SPANS:
                    amount = provider.limit(span)
                    if amount is not None:
                        purse = self._purse(name, tenant, span)
                        purse.window.amount = int(amount * (share if tenant and share else 1) * MICRO)
                        found.append(purse)
                self._of[name, tenant] = tuple(found)
        self._catch_up()
        for spending in self._under_way:
            spending.reserve_in([purse.window for purse in self._purses_of(*spending.payer[:2])])

    def _purse(self, provider: str, tenant: str, span: Span) -> Purse:
        key = (provider, tenant, span)
        purse = self._purses.get(key)
        if purse is None:
            purse = self._purses[key] = Purse(f"{tenant or 'all tenants'} at {provider}", span, self._calendar)
        return purse

    def _catch_up(self) -> None:
        """Count in each budget what was spent before the policy had it: a month, or a tenant's share, may be new."""
        spent: defaultdict[tuple[str, str, Span], Counter[int]] = defaultdict(Counter)  # micro-units by window's start
        for (provider, tenant, _, span), line in self.lines.items():
            for payer in ("", tenant):
                spent[provider, payer, span][line.money.start] += line.money.counted
        for provider, tenant, purse in self.purses():
            for start, micro in spent.get((provider, tenant, purse.window.span), {}).items():
                purse.window.raise_to(start, micro)

    # -- one call -----------------------------------------------------------------------------------------------

    def may_spend(self, provider: str, call: Call, now: float, others: Iterable[Call] = ()) -> bool:
        """Whether the highest cost of the call, and of `others` of its tenant beside it, is within the budgets of the
        provider and of the tenant, and within what is kept of them."""
        tariff = self._tariffs.get(provider)
        if tariff is None or not self.known:
            return False
        cost = sum([tariff.highest(each) for each in (call, *others)])
        purses = self._purses_of(provider, call.tenant)
        if not all(purse.window.allows(cost, now) for purse in purses):
            return False
        if self.ahead and [purse for purse in purses if not purse.covers(cost, now)]:
            self.short()
            return False
        return True

    def spent_until(self, provider: str, call: Call, now: float) -> float | None:
        """Return the seconds until the budgets that keep the call out may have room for it, infinite: they never have;
        None: no budget keeps it out."""
        tariff = self._tariffs.get(provider)
        cost = 0 if tariff is None else tariff.highest(call)
        waits = [
            purse.window.frees_in(cost, now)
            for purse in self._purses_of(provider, call.tenant)
            if not purse.window.allows(cost, now)
        ]
        return max(waits, default=None)

    def reserve(self, provider: str, call: Call, now: float) -> Spending:
        """Reserve the highest cost of the call, which `may_spend` has allowed at this moment."""
        tariff = self._tariffs[provider]
        cost = tariff.highest(call)
        windows = tuple([purse.window for purse in self._purses_of(provider, call.tenant)])
        for window in windows:
            window.reserve(cost, now)
        spending = Spending(self, call, (provider, call.tenant, call.model), tariff, windows, cost)
        self._under_way.add(spending)
        return spending

    def begin(self, engine: str, call: Call, tokens: int, now: float) -> EngineTime:
        """Begin the call's share of the time of an own engine, on which it holds so many tokens."""
        return EngineTime(self.count, call, self.meters, engine, tokens, now)

    def _purses_of(self, provider: str, tenant: str) -> tuple[Purse, ...]:
        return self._of.get((provider, ""), ()) + self._of.get((provider, tenant), ())

    def ended(self, spending: Spending) -> None:
        """Forget the reservation of an attempt that has ended."""
        self._under_way.discard(spending)

    def count(self, payer: Payer, micro: int, tokens: int, now: float) -> None:
        """Count the cost of an attempt that has ended."""
        before = self.totals.get(payer, (0, 0))
        self.totals[payer] = before[0] + micro, before[1] + tokens
        for span in SPANS:
            line = self._line(payer, span)
            line.money.settle(0, micro, now)
            line.tokens.settle(0, tokens, now)

    def _line(self, payer: Payer, span: Span) -> SpentLine:
        """Return the line of a payer, whose amounts are about to change."""
        key = (*payer, span)
        self.changed.add(key)
        line = self.lines.get(key)
        if line is None:
            line = self.lines[key] = SpentLine(" ".join(payer), span, self._calendar)
        return line

    # -- what outlasts the gateway ------------------------------------------------------------------------------

    def states(self, now: float, lines: Iterable[LineKey] | None = None, *, last: bool = False) -> list[Spent]:
        """Return all that is to be kept, or marks and `lines` alone. `last`: nothing more goes out, and marks come down
        to what was promised."""
        found = []
        for key in self.lines if lines is None else lines:
            line = self.lines[key]
            micro, tokens = line.money.counted, line.tokens.counted
            if micro or tokens:
                found.append(Spent(*key, line.money.start, micro, tokens))
        for (provider, tenant), purses in self._of.items():
            for purse in purses:
                window = purse.window
                promised = window.used(now) + window.reserved
                mark = promised if last else purse.next_mark(now)
                found.append(Spent(provider, tenant, "", window.span, window.start_at(now), mark, 0))
        return found

    def keep(self, states: Iterable[Spent]) -> None:
        """Note that these are kept."""
        for each in states:
            purse = self._purses.get((each.provider, each.tenant, each.span))
            if purse is not None and not each.model:
                purse.keep(each.micro, each.start)
                purse.wanted = 0

    def restore(self, states: Iterable[Spent], now: float, *, kept: bool) -> None:
        """Go on from what was kept before. `kept`: it is still kept where marks are."""
        for each in states:
            if each.model:
                line = self._line((each.provider, each.tenant, each.model), each.span)
                line.money.goes_on(Used("", each.span, each.start, each.micro), now)
                line.tokens.goes_on(Used("", each.span, each.start, each.tokens), now)
            else:
                self._purse(each.provider, each.tenant, each.span).restore(each.micro, each.start, now)
        self._catch_up()
        self.known = self.known or kept

    def forget(self) -> None:
        """Spend nothing before the amounts of the gateway before are here and new marks are kept."""
        self.known = False
        for _, _, purse in self.purses():
            purse.marked = NO_WINDOW

    def exhaust(self, now: float) -> bool:
        """Take the budgets of now as spent, since nobody knows what was. Return whether there are any."""
        for _, _, purse in self.purses():
            purse.restore(purse.window.amount or 0, purse.window.start_at(now), now)
        return bool(self._tariffs)

    def purses(self) -> Iterator[tuple[str, str, Purse]]:
        """Yield every budget of the policy: provider, tenant ("": all), and its purse."""
        for (provider, tenant), purses in self._of.items():
            for purse in purses:
                yield provider, tenant, purse
