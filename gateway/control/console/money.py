"""Money of providers as entries of the console."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.core.money.book import MoneyBook
from gateway.core.money.tariff import MICRO

ROWS = 200  # of tenants and models that are shown of a provider: those that cost most


def money_entries(money: MoneyBook, now: float) -> Iterator[tuple[str, object]]:
    """Yield the entry of each provider: its budgets, and what each tenant's calls for each model have cost since the
    start."""
    found: dict[str, dict[str, list[list[object]]]] = {}
    for provider, tenant, purse in money.purses():
        if not tenant:
            window = purse.window
            amounts = (window.used(now), window.reserved, window.amount or 0)
            entry = found.setdefault(provider, {"budgets": [], "spent": []})
            entry["budgets"].append([window.span, *(amount / MICRO for amount in amounts)])
    for (provider, tenant, model), (micro, tokens) in sorted(money.totals.items(), key=lambda each: -each[1][0]):
        if provider in found and len(found[provider]["spent"]) < ROWS:
            found[provider]["spent"].append([tenant, model, tokens, micro / MICRO])
    for provider, entry in found.items():
        yield f"provider/{provider}", entry
