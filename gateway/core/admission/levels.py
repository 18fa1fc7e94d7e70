"""Levels of rate limits: the limit that counts a call at each level, and the policy's path of it.

Levels, most specific first: (tenant, model), (tenant, class), tenant, class, model, global. "" stands where a level
does not depend on a name. A tenant without limits of its own has `limits.per_tenant`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import AnyLimit, Limit, Quantity, RateLimit, Tenant
from gateway.shared.files.checked import Path

Kind = Literal["requests", "tokens"]
KINDS: tuple[Kind, ...] = ("requests", "tokens")
Level = tuple[str, str, str]  # tenant, class, model


class Counted(msgspec.Struct, frozen=True):
    """A level's limit. `path`: where it stands, or would stand; `quota` None: no limit. `default`: its level's."""

    path: Path
    quota: RateLimit | None
    default: bool = False


def levels_of(tenant: str, class_name: str, model: str) -> list[Level]:
    """The levels that count a call, most specific first."""
    return [
        (tenant, "", model),
        (tenant, class_name, ""),
        (tenant, "", ""),
        ("", class_name, ""),
        ("", "", model),
        ("", "", ""),
    ]


def counted(policy: Policy, kind: Kind, level: Level) -> Counted:
    """The limit of calls (`requests`) or tokens at one level."""
    for default, (path, limit) in enumerate(_candidates(policy, level)):
        quantity: Quantity = getattr(limit, kind)
        if quantity is not None:
            return Counted((*path, kind), quantity if isinstance(quantity, RateLimit) else None, bool(default))
    path, _ = next(_candidates(policy, level))
    return Counted((*path, kind), None)


def _candidates(policy: Policy, level: Level) -> Iterator[tuple[Path, AnyLimit]]:
    """The entries of a policy that may set a level's limit: its own, then its default."""
    tenant, class_name, model = level
    limits = policy.limits
    own = policy.tenants.get(tenant, Tenant()).limits
    if tenant and model:
        yield ("tenants", tenant, "limits", "models", model), own.models.get(model, Limit())
    elif tenant and class_name:
        yield ("tenants", tenant, "limits", "classes", class_name), own.classes.get(class_name, Limit())
    elif tenant:
        yield ("tenants", tenant, "limits"), own
        yield ("limits", "per_tenant"), limits.per_tenant
    elif class_name:
        yield ("limits", "classes", class_name), limits.classes.get(class_name, Limit())
    elif model:
        yield ("limits", "models", model), limits.models.get(model, Limit())
    else:
        yield ("limits", "global"), limits.global_
