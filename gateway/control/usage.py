"""Tokens that tenants have used and money that calls cost, for GET /usage: of this day and month as JSON, all that is
kept as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any

from gateway.core.admission.quotas import QuotaWindow, Used, day_text
from gateway.core.money.book import MoneyBook, Spent
from gateway.core.money.engine_time import HOME
from gateway.core.money.purse import Purse
from gateway.core.money.tariff import MICRO

FORMULA = ("=", "+", "-", "@", "\t", "\r")
COLUMNS = ("tenant", "window", "start", "tokens", "provider", "model", "money")


def usage_view(windows: Iterable[QuotaWindow], money: MoneyBook, now: float) -> dict[str, object]:
    """Tokens by tenant, empty if the policy has no storage, and money by provider and on own engines, if they cost any,
    in this calendar day and month in UTC."""
    tenants: dict[str, dict[str, object]] = {}
    for each in windows:
        tenants.setdefault(each.tenant, {})[each.span] = {
            "start": day_text(each.start_at(now)),
            "used": each.used(now),
            "reserved": each.reserved,  # by calls under way, estimated
            "quota": each.amount,
            "resets_in_s": round(each.resets_in(now), 3),
        }
    view: dict[str, object] = {"tenants": tenants}
    providers, price = _providers(money, now), money.meters.price
    if providers:
        view["providers"] = providers
    if price is not None:
        view["engines"] = {"price": str(price), "spent": list(_spent(money, HOME, now))}
    return view


def _providers(money: MoneyBook, now: float) -> dict[str, dict[str, Any]]:
    """Money by provider: budgets of all tenants together, shares of single ones, and what tenants' models have cost."""
    found: dict[str, dict[str, Any]] = {}
    for provider, tenant, purse in money.purses():
        entry = found.setdefault(provider, {"budgets": {}, "shares": {}})
        budgets = entry["shares"].setdefault(tenant, {}) if tenant else entry["budgets"]
        budgets[purse.window.span] = _money(purse, now)
    for provider, entry in found.items():
        entry["spent"] = list(_spent(money, provider, now))
    return found


def _spent(money: MoneyBook, payee: str, now: float) -> Iterator[dict[str, object]]:
    """Yield what each tenant's calls for each model of a provider, or of own engines, have cost."""
    for (provider, tenant, model, span), line in sorted(money.lines.items()):
        if provider == payee:
            yield {
                "tenant": tenant,
                "model": model,
                "window": span,
                "start": day_text(line.money.start_at(now)),
                "money": line.money.used(now) / MICRO,
                "tokens": line.tokens.used(now),
            }


def _money(purse: Purse, now: float) -> dict[str, object]:
    """Budget in the currency of the provider's prices."""
    window = purse.window
    start = window.start_at(now)
    return {
        "start": day_text(start),
        "spent": window.used(now) / MICRO,
        "reserved": window.reserved / MICRO,  # by calls under way, at their highest cost
        "budget": (window.amount or 0) / MICRO,
        "kept": (purse.mark if purse.marked == start else 0) / MICRO,  # a restart after a kill counts it as spent
        "resets_in_s": round(window.resets_in(now), 3),
    }


def usage_csv(history: Iterable[Used], spent: Iterable[Spent]) -> str:
    """A line for each tenant and window, then one for each tenant, window, provider and model, with a head line. An
    engine's name of a model that a spreadsheet would take for a formula begins with an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for each in history:
        writer.writerow((each.tenant, each.span, day_text(each.start), each.tokens, "", "", ""))
    for row in spent:
        money = f"{row.micro // MICRO}.{row.micro % MICRO:06}"
        model = f"'{row.model}" if row.model.startswith(FORMULA) else row.model
        writer.writerow((row.tenant, row.span, day_text(row.start), row.tokens, row.provider, model, money))
    return text.getvalue()
