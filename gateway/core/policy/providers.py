"""Policy of providers: APIs outside the house that answer calls which the own engines cannot, for money."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Annotated, ClassVar, Literal

import msgspec

from gateway.core.money.tariff import Tariff
from gateway.core.policy.types import ClassName, KeyFile, ModelName, TenantOfPolicy
from gateway.shared.files.kinds import Text
from gateway.shared.files.units import FACTOR, SHARE

MOST_MONEY = 100_000_000
# Rules judge the rest of the address, so that no message shows the password of a user in it.
ProviderUrl = Annotated[str, Text(r"https?://[!-~]{1,2000}", "https://HOST/v1", secret=True)]


class MoneyLimit(msgspec.Struct, frozen=True):
    """Money in a calendar window, `20/day` or `300/month`, or the share of both that one tenant may use, `50%/tenant`.
    `parse` and `str` are each other's reverse."""

    pattern: ClassVar[str] = r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(/day|/month|%/tenant)"
    what: ClassVar[str] = "20/day or 300/month, money from 0.01 to 100000000, or 50%/tenant, from 0.1%"

    amount: float
    per: Literal["day", "month", "tenant"]

    @classmethod
    def parse(cls, text: str) -> MoneyLimit | None:
        """The limit; None where the text is none, or is out of bounds."""
        match = re.fullmatch(cls.pattern, text)
        if match is None:
            return None
        amount = float(match[1])
        if match[2] == "%/tenant":
            return cls(float(Decimal(match[1]) / 100), "tenant") if 0.1 <= amount <= 100 else None
        return cls(amount, "day" if match[2] == "/day" else "month") if 0.01 <= amount <= MOST_MONEY else None

    @classmethod
    def meant(cls, text: str) -> Iterator[str]:
        """Limits that a malformed text may mean, as with prices."""
        yield from Tariff.meant(text)

    def __str__(self) -> str:
        return f"{SHARE.show(self.amount) if self.per == 'tenant' else FACTOR.show(self.amount)}/{self.per}"


class Provider(msgspec.Struct, frozen=True, kw_only=True):
    """An OpenAI-compatible API outside the house, as the last resort of model routes. No call leaves the house unless
    its tenant and its class are named here. See docs/providers.md.

    `url`: Address of the API, as OpenAI's clients have it in base_url, such as https://api.example.com/v1.
    `key_file`: File with the API key alone in it, which other users may not read.
    `models`: Models by the names that callers and routes use, each with its name at the provider, such as
    {mini: small-model-name}.
    `prices`: Prices of all these models, in the currency of the budget.
    `budget`: Money that calls may cost in calendar windows in UTC, such as [20/day, 300/month], and the share of it
    that one tenant may use, such as 50%/tenant. The highest cost of a call is reserved before it goes out.
    `tenants`: Tenants whose calls may leave the house; empty: nobody's.
    `classes`: Classes of calls that may leave the house; empty: none.
    `spill`: Calls of model routes that go to the provider where `fallback` names its models. late: those that no member
    could serve within their targets; errors: those whose members are all down or failing; never: none. Callers may
    also ask for its models by name.
    `allow_private`: Whether the address may be this machine's or a private network's, and its scheme http.
    """

    url: ProviderUrl
    key_file: KeyFile
    models: Mapping[ModelName, ModelName]
    prices: Tariff
    budget: tuple[MoneyLimit, ...]
    tenants: tuple[TenantOfPolicy, ...] = ()
    classes: tuple[ClassName, ...] = ()
    spill: Literal["late", "errors", "never"] = "late"
    allow_private: bool = False

    def limit(self, per: str) -> float | None:
        """Return the money a day or a month, or the share of a tenant, if the budget has one."""
        return next((each.amount for each in self.budget if each.per == per), None)
