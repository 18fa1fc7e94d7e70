"""Policy of providers: APIs outside the house that answer calls which the own engines cannot, for money."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from gateway.core.money.tariff import Tariff
from gateway.core.policy.types import Bounds, FileName, ModelName, Name, TenantName
from gateway.shared.files.kinds import Text
from gateway.shared.files.units import Factor, Share

Money = Annotated[Factor, Bounds(ge=0.01, le=100_000_000)]
# Rules judge the rest of the address, so that no message shows the password of a user in it.
ProviderUrl = Annotated[str, Text(r"https?://[!-~]{1,2000}", "https://HOST/v1", secret=True)]


class MoneyBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Money that a provider's calls may cost in calendar windows in UTC. The highest cost of a call is reserved before
    it goes out.

    `day`: Money a day; null: the month's budget alone.
    `month`: Money a calendar month; null: the day's budget alone.
    `per_tenant`: Share of both that one tenant may use.
    """

    day: Money | None = None
    month: Money | None = None
    per_tenant: Annotated[Share, Bounds(ge=0.001, le=1)] = 1.0


class Provider(msgspec.Struct, frozen=True, kw_only=True):
    """An OpenAI-compatible API outside the house, as the last resort of model routes. No call leaves the house unless
    its tenant and its class are named here. See docs/providers.md.

    `url`: Address of the API, as OpenAI's clients have it in base_url, such as https://api.example.com/v1.
    `key_file`: File with the API key alone in it, which other users may not read.
    `models`: Models by the names that callers and routes use, each with its name at the provider, such as
    {mini: small-model-name}.
    `prices`: Prices of all these models, in the currency of the budget.
    `budget`: Money that calls may cost.
    `tenants`: Tenants whose calls may leave the house; empty: nobody's.
    `classes`: Classes of calls that may leave the house; empty: none.
    `spill`: Calls of model routes that go to the provider where `fallback` names its models. late: those that no member
    could serve within their targets; errors: those whose members are all down or failing; never: none. Callers may
    also ask for its models by name.
    `allow_private`: Whether the address may be this machine's or a private network's, and its scheme http.
    """

    url: ProviderUrl
    key_file: FileName
    models: Mapping[ModelName, ModelName]
    prices: Tariff
    budget: MoneyBudget
    tenants: tuple[TenantName, ...] = ()
    classes: tuple[Name, ...] = ()
    spill: Literal["late", "errors", "never"] = "late"
    allow_private: bool = False
