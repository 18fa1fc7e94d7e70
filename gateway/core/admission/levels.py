"""Levels of rate limits: (tenant, model), (tenant, class), tenant, class, model, global.

"" stands where a level does not depend on a name. A tenant without limits of its own has `limits.per_tenant`.
"""

from __future__ import annotations

from typing import Literal

from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import AnyLimit, Limit, Quantity, RateLimit, Tenant

Kind = Literal["requests", "tokens"]
Level = tuple[str, str, str]  # tenant, class, model


def limit_at(policy: Policy, kind: Kind, level: Level) -> RateLimit | None:
    """The limit of calls (`requests`) or tokens at one level; None: there is none."""
    quantity: Quantity = getattr(_limit(policy, level), kind)
    if quantity is None and level[0] and not any(level[1:]):
        quantity = getattr(policy.limits.per_tenant, kind)
    return quantity if isinstance(quantity, RateLimit) else None


def _limit(policy: Policy, level: Level) -> AnyLimit:
    """The policy's entry of a level."""
    tenant, class_name, model = level
    of = policy.tenants.get(tenant, Tenant()).limits if tenant else policy.limits
    if model:
        return of.models.get(model, Limit())
    if class_name:
        return of.classes.get(class_name, Limit())
    return policy.limits.global_ if of is policy.limits else policy.tenants.get(tenant, Tenant()).limits
