"""Issuer of callers' tokens, as a policy has it: made anew only where the policy or its keys' file has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.core.policy.policy import Policy

if TYPE_CHECKING:
    from gateway.relay.issuer import Issuer


def issuer_of(policy: Policy, jwks: bytes, before: Issuer | None, say: Callable[[str], None]) -> Issuer | None:
    """Return the policy's issuer; None: it has none. `jwks`: the content of `auth.jwks`. Raises ValueError for a
    file without keys, ModuleNotFoundError without PyJWT."""
    if policy.auth is None:
        return None
    if before is not None and (before.auth, before.jwks) == (policy.auth, jwks):
        return before
    from gateway.relay.issuer import Issuer  # noqa: PLC0415 # PyJWT is an extra

    return Issuer(policy.auth, jwks, say, before=before)
