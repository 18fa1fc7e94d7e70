"""Tokens that tenants have used in this day and month, for GET /usage as JSON, and all that is kept, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from gateway.core.admission.quotas import QuotaWindow, Used, day_text

COLUMNS = ("tenant", "window", "start", "tokens")


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


class UsageView(msgspec.Struct, frozen=True):
    """Token usage by tenant. Empty if the policy has no storage."""

    tenants: dict[str, TenantUsage]


class UsageSource(msgspec.Struct, frozen=True):
    """`windows`: those of now. `history`: all that is kept; it raises StorageError."""

    windows: Callable[[], Iterable[QuotaWindow]]
    history: Callable[[], Awaitable[list[Used]]]


def usage_view(windows: Iterable[QuotaWindow], now: float) -> UsageView:
    views: dict[str, dict[str, WindowView]] = {}
    for each in windows:
        view = WindowView(
            day_text(each.start_at(now)), each.used(now), each.reserved, each.amount, round(each.resets_in(now), 3)
        )
        views.setdefault(each.tenant, {})[each.span] = view
    return UsageView({tenant: TenantUsage(**spans) for tenant, spans in views.items()})


def usage_csv(history: Iterable[Used]) -> str:
    """A line for each tenant and window, with a head line. Names of tenants hold nothing that a sheet would run."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for each in history:
        writer.writerow((each.tenant, each.span, day_text(each.start), each.tokens))
    return text.getvalue()
