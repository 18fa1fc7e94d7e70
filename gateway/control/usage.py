"""Tokens that tenants have used and money that providers cost in this day and month, for GET /usage as JSON, and all
that is kept, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from gateway.core.admission.quotas import QuotaWindow, Span, Used, day_text
from gateway.core.money.book import MoneyBook, Spent
from gateway.core.money.purse import Purse
from gateway.core.money.tariff import MICRO

COLUMNS = ("tenant", "window", "start", "tokens", "provider", "model", "money")


class WindowView(msgspec.Struct, frozen=True):
    """A calendar window in UTC, begun on the day `start`. `reserved`: held by calls under way, estimated. `quota`:
    null: none. `resets_in_s`: seconds until the next."""

    start: str
    used: int
    reserved: int
    quota: int | None
    resets_in_s: float


class TenantUsage(msgspec.Struct, frozen=True):
    day: WindowView
    month: WindowView


class MoneyView(msgspec.Struct, frozen=True):
    """Money in one calendar window in UTC, in the currency of the provider's prices. `reserved`: for calls under way,
    at their highest cost. `kept`: the amount that a restart after a kill counts as spent."""

    start: str
    spent: float
    reserved: float
    budget: float
    kept: float
    resets_in_s: float


class SpentView(msgspec.Struct, frozen=True):
    """Use of one tenant and model of a provider since `start`, a day in UTC."""

    tenant: str
    model: str
    window: Span
    start: str
    money: float
    tokens: int


class ProviderUsage(msgspec.Struct, frozen=True):
    """`budgets`: of all tenants together by window, `shares`: of single tenants, where the policy bounds those."""

    budgets: dict[str, MoneyView]
    shares: dict[str, dict[str, MoneyView]]
    spent: list[SpentView]


class UsageView(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token usage by tenant, empty if the policy has no storage; money by provider."""

    tenants: dict[str, TenantUsage]
    providers: dict[str, ProviderUsage] = {}


class UsageSource(msgspec.Struct, frozen=True):
    """`windows`: those of now. `history`, `spent`: all that is kept; they raise StorageError. `money`: of now."""

    windows: Callable[[], Iterable[QuotaWindow]]
    history: Callable[[], Awaitable[list[Used]]]
    money: MoneyBook
    spent: Callable[[], Awaitable[list[Spent]]]


def usage_view(windows: Iterable[QuotaWindow], money: MoneyBook, now: float) -> UsageView:
    views: dict[str, dict[str, WindowView]] = {}
    for each in windows:
        view = WindowView(
            day_text(each.start_at(now)), each.used(now), each.reserved, each.amount, round(each.resets_in(now), 3)
        )
        views.setdefault(each.tenant, {})[each.span] = view
    return UsageView({tenant: TenantUsage(**spans) for tenant, spans in views.items()}, _providers(money, now))


def _providers(money: MoneyBook, now: float) -> dict[str, ProviderUsage]:
    views: dict[str, ProviderUsage] = {}
    for provider, tenant, purse in money.purses():
        view = views.setdefault(provider, ProviderUsage({}, {}, []))
        budgets = view.shares.setdefault(tenant, {}) if tenant else view.budgets
        budgets[purse.window.span] = _money(purse, now)
    for (provider, tenant, model, span), line in sorted(money.lines.items()):
        if provider in views:
            start, spent = day_text(line.money.start_at(now)), line.money.used(now) / MICRO
            views[provider].spent.append(SpentView(tenant, model, span, start, spent, line.tokens.used(now)))
    return views


def _money(purse: Purse, now: float) -> MoneyView:
    window = purse.window
    start = window.start_at(now)
    amounts = (window.used(now), window.reserved, window.amount or 0, purse.mark if purse.marked == start else 0)
    spent, reserved, budget, kept = (amount / MICRO for amount in amounts)
    return MoneyView(day_text(start), spent, reserved, budget, kept, round(window.resets_in(now), 3))


def usage_csv(history: Iterable[Used], spent: Iterable[Spent]) -> str:
    """A line for each tenant and window, then one for each tenant, window, provider and model, with a head line. Names
    hold nothing that a sheet would run."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for each in history:
        writer.writerow((each.tenant, each.span, day_text(each.start), each.tokens, "", "", ""))
    for row in spent:
        money = f"{row.micro // MICRO}.{row.micro % MICRO:06}"
        writer.writerow((row.tenant, row.span, day_text(row.start), row.tokens, row.provider, row.model, money))
    return text.getvalue()
