"""Levels of rate limits: each limit of a policy counts a call at its own level alone."""

from __future__ import annotations

from typing import get_args

import pytest

from gateway.core.admission.levels import Kind, Level, limit_at
from gateway.core.admission.limits import LimitBook
from gateway.core.policy.file import decode
from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import RateLimit
from gateway.core.policy.types import Rate
from gateway.core.request.outcome import Refused

ONE = RateLimit(rate=Rate(1, 3600.0))
TWO = RateLimit(rate=Rate(2, 3600.0))
ACME = ("acme", "", "")
LEVELS = [("acme", "", "m"), ("acme", "batch", ""), ACME, ("", "batch", ""), ("", "", "m"), ("", "", "")]
# Where a limit may stand, and the level it is at.
PLACES: list[tuple[str, Level]] = [
    ("tenants: {acme: {limits: {models: {m: LIMIT}}}}", ("acme", "", "m")),
    ("tenants: {acme: {limits: {classes: {batch: LIMIT}}}}", ("acme", "batch", "")),
    ("tenants: {acme: {limits: LIMIT}}", ACME),
    ("tenants: {acme: {}}\nlimits: {per_tenant: LIMIT}", ACME),
    ("limits: {classes: {batch: LIMIT}}", ("", "batch", "")),
    ("limits: {models: {m: LIMIT}}", ("", "", "m")),
    ("limits: {global: LIMIT}", ("", "", "")),
]


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize(("text", "level"), PLACES)
def test_a_limit_is_found_at_its_level_and_counts_there(text: str, level: Level, kind: Kind) -> None:
    given = decode(f"keys_file: k\n{text.replace('LIMIT', f'{{{kind}: 1/h}}')}\n".encode())
    assert [limit_at(given, kind, each) for each in LEVELS] == [ONE if each == level else None for each in LEVELS]
    book = LimitBook(given)
    book.charge("acme", "batch", "m", 1, 0.0)
    with pytest.raises(Refused) as refused:
        book.charge("acme", "batch", "m", 1, 0.0)
    assert refused.value.limit == f"{ONE.rate} {kind}"


def test_a_limit_of_its_own_replaces_the_default() -> None:
    given = decode(
        b"limits: {per_tenant: {requests: 1/h, tokens: 1/h}}\nkeys_file: k\ntenants: {acme: {limits: {requests: 2/h}}}"
    )
    assert limit_at(given, "requests", ACME) == TWO
    assert limit_at(given, "tokens", ACME) == ONE


def test_unlimited_replaces_the_default_too() -> None:
    given = decode(
        b"limits: {per_tenant: {requests: 1/h}}\nkeys_file: k\ntenants: {acme: {limits: {requests: unlimited}}}"
    )
    assert limit_at(given, "requests", ACME) is None


def test_a_tenant_that_the_policy_does_not_have_has_the_default() -> None:
    assert limit_at(Policy(), "tokens", ("nobody", "", "")) is None
