"""Tenants, limits and money of providers as entries of the console."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gateway.control.parts import Used
from gateway.control.policy_view import HASH_SHOWN
from gateway.core.admission.bucket import Bucket
from gateway.core.money.book import MoneyBook
from gateway.core.money.tariff import MICRO
from gateway.core.policy.traffic import Tenant

TENANTS = 500  # shown: those that used most
KEYS = 20  # shown of each
LIMITS = 50  # shown of each
ROWS = 200  # of tenants and models that are shown of a provider: those that cost most


def tenant_entries(
    tenants: Mapping[str, Tenant], used: Mapping[str, Used], buckets: Iterable[Bucket], now: float
) -> Iterator[tuple[str, object]]:
    """Yield the entry of each tenant, of TENANTS at most: its rights, its usage, and what its limits have left."""
    limits: dict[str, list[object]] = {}
    for bucket in buckets:
        kind, tenant, class_name, model = bucket.key
        own = limits.setdefault(tenant, [])
        if len(own) < LIMITS:
            what = f"class {class_name}" if class_name else ""
            what = f"model {model}" if model else what
            own.append([kind, what, str(bucket.quota.rate), bucket.burst, bucket.left(now)])
    nothing: Used = (0, 0, 0)
    names = sorted(tenants, key=lambda name: (-used.get(name, nothing)[2], -used.get(name, nothing)[0], name))
    weights = sum([tenant.weight for tenant in tenants.values()])
    for order, name in enumerate(names[:TENANTS]):
        found = tenants[name]
        ended, answered, tokens = used.get(name, nothing)
        told = {
            "order": order,
            "weight": found.weight,
            "share": round(found.weight / weights, 4),
            "class": found.class_,
            "best_class": found.best_class,
            "models": list(found.models),
            "keys": [key[:HASH_SHOWN] for key in found.keys[:KEYS]],
            "all_keys": len(found.keys),
            "ended": ended,
            "answered": answered,
            "tokens": tokens,
            "limits": limits.get(name, []),
        }
        yield f"tenant/{name}", told
    yield "limits", limits.get("", [])


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
