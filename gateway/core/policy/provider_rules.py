"""Validation of providers: addresses that could leak, names that have another meaning, budgets that hold nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import takewhile
from urllib.parse import urlsplit

from gateway.core.engines.origin import HOST
from gateway.core.policy.policy import Policy
from gateway.core.policy.providers import Provider
from gateway.shared.addresses import is_private, is_public
from gateway.shared.files.checked import Fault, Path, readable
from gateway.shared.files.units import FACTOR

NO_USER = "no user or password, and no query or fragment: the key is in key_file"
PRIVATE = "https:// at a public address; or allow_private: true, for a provider within the house"
HTTPS = "https://, or whoever is on the way could read calls and key; or allow_private: true, at a private address"


def engines_price(policy: Policy) -> Iterator[Fault]:
    """Yield the fault of a price of own engines."""
    if policy.engines_price is not None and policy.storage is None:
        yield Fault(("engines_price",), "a price, and no storage", "storage: FOLDER too, where the money is kept")


def providers(policy: Policy) -> Iterator[Fault]:
    """Yield the faults of every provider."""
    for name, provider in policy.providers.items():
        path = ("providers", name)
        yield from readable(
            _url(provider, path), _models(policy, name, provider), _budget(provider, path, policy.storage)
        )


def _url(provider: Provider, path: Path) -> Iterator[Fault]:
    path = (*path, "url")
    try:
        parts = urlsplit(provider.url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        yield Fault(path, "an address with a malformed host or port", "https://HOST/v1")
        return
    if parts.username is not None or "?" in provider.url or "#" in provider.url:
        yield Fault(path, "an address with more than host and path", NO_USER)
    elif HOST.fullmatch(host) is None or port == 0:
        yield Fault(path, "an address with a malformed host or port", "https://HOST/v1")
    elif parts.scheme != "https" and (is_public(host) or not provider.allow_private):
        yield Fault(path, "http://", HTTPS)
    elif is_private(host) and not provider.allow_private:
        yield Fault(path, f"{host}, which is no public address", PRIVATE)


def _models(policy: Policy, name: str, provider: Provider) -> Iterator[Fault]:
    path = ("providers", name, "models")
    if not provider.models:
        yield Fault(path, "no model", "models by the names that callers use, such as {mini: small-model-name}")
    known = frozenset(model for engine in policy.fleet.engines for model in engine.models)
    for model in provider.models:
        if model in policy.models:
            yield Fault((*path, model), "the name of a model route", "a name of its own, for the route's fallback")
        elif model in known:
            expected = "a name of its own: calls would leave the house"
            yield Fault((*path, model), "the name of an engine's model", expected)
        else:
            yield from readable(_twice(policy.providers, name, model))


def _twice(providers: Mapping[str, Provider], name: str, model: str) -> Iterator[Fault]:
    for other in takewhile(name.__ne__, providers):
        if model in providers[other].models:
            found = f"{model} again (as in providers.{other})"
            yield Fault(("providers", name, "models", model), found, "each name once")


def _budget(provider: Provider, path: Path, storage: str | None) -> Iterator[Fault]:
    path = (*path, "budget")
    for index, limit in enumerate(provider.budget):
        if limit.per in [earlier.per for earlier in provider.budget[:index]]:
            yield Fault((*path, index), f"a second limit a {limit.per}", "one at most")
    day, month = provider.limit("day"), provider.limit("month")
    if day is None and month is None:
        yield Fault(path, "money neither a day nor a month", "one of them, or both, such as [20/day, 300/month]")
    elif day is not None and month is not None and day > month:
        yield Fault(path, f"{FACTOR.show(day)}/day", f"at most the month's, {FACTOR.show(month)}")
    if storage is None:
        yield Fault(path, "a budget, and no storage", "storage: FOLDER too, where the money spent is kept")
