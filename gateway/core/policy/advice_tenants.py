"""Advice about tenants, their limits, and the models they name. `advice.py` gathers it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from gateway.core.policy.policy import Policy
from gateway.core.policy.rules import HINTS
from gateway.core.policy.traffic import RateLimit
from gateway.core.policy.types import NameOf
from gateway.shared.files.checked import Path, nearest
from gateway.shared.files.marks import marked

ANONYMOUS = "anonymous"
PLACEHOLDERS = ("tenant", "class", "model", "limit", "retry_after", "request_id")  # of a refusal's texts

Found = Iterator[tuple[Path, str]]


def tenant_rules(policy: Policy) -> Found:
    """Every rule of this file."""
    for rule in (_tenants, _anonymous, _refusals, _models):
        yield from rule(policy)


def _tenants(policy: Policy) -> Found:
    order = list(policy.classes)
    if not policy.tenants:
        yield ("tenants",), "there are none, so every call is refused with 401"
    nameless = policy.keys_file is None and policy.auth is None and not policy.trusted_proxies
    for name, tenant in policy.tenants.items():
        best = tenant.best_class
        if best is not None and tenant.class_ is None and order.index("default") < order.index(best):
            text = f"calls that ask for no class are of class default, which is above it: add class: {best}"
            yield ("tenants", name, "best_class"), text
        if name != ANONYMOUS and not tenant.keys and nameless:
            yield ("tenants", name), "nobody can be this tenant: no keys, no keys_file, no auth, no trusted proxy"


def _anonymous(policy: Policy) -> Found:
    tenant = policy.tenants.get(ANONYMOUS)
    if tenant is None or len(policy.tenants) == 1:
        return
    any_class = tenant.best_class in (None, next(iter(policy.classes)))
    own, usual = tenant.limits, policy.limits.per_tenant
    limits = (own.requests or usual.requests, own.tokens or usual.tokens)
    if any_class and not any(isinstance(limit, RateLimit) for limit in limits):
        text = "callers without a key may ask for any class and have no limit: give it best_class and limits"
        yield ("tenants", ANONYMOUS), text


def _refusals(policy: Policy) -> Found:
    for name, tenant in policy.tenants.items():
        text = msgspec.json.encode(tenant.refusal.body).decode() if tenant.refusal else ""
        for place in dict.fromkeys(re.findall(r"\{(\w+)\}", text)):
            if place not in PLACEHOLDERS:
                yield (
                    ("tenants", name, "refusal", "body"),
                    f"{{{place}}} stands for nothing and is sent as it is{_hint(nearest(place, PLACEHOLDERS))}",
                )


def _hint(word: str | None) -> str:
    return f" (did you mean {word}?)" if word else ""


def _models(policy: Policy) -> Found:
    """Models that no engine serves, where the policy says of all engines what they serve."""
    engines = policy.fleet.engines
    known = {model for engine in engines for model in engine.models}
    if not engines or not all(engine.models for engine in engines):
        return
    named = [(path, name) for path, name, mark in marked(policy, NameOf) if mark.field == "engines"]
    for index, (path, name) in enumerate([each for each in named if each[1] not in known]):
        yield path, f"no engine of fleet.engines serves {name}{_hint(nearest(name, known) if index < HINTS else None)}"
