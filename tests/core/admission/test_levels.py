"""Levels of rate limits: `--explain` and the advice name the limit that really counts a call."""

from __future__ import annotations

import pytest

from gateway.core.admission.levels import KINDS, Counted, Kind, Level, counted, levels_of
from gateway.core.admission.limits import LimitBook
from gateway.core.policy.file import decode
from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import RateLimit
from gateway.core.policy.types import Rate
from gateway.core.request.outcome import Refused
from gateway.shared.files.checked import spelled

ONE = RateLimit(rate=Rate(1, 3600.0))
TWO = RateLimit(rate=Rate(2, 3600.0))


def policy(text: str) -> Policy:
    return decode(f"keys_file: k\ntenants: {{acme: {{}}}}\n{text}".encode())


# Where a limit may stand, the level it is at, and whether it is that level's default.
PLACES: list[tuple[str, Level, str, bool]] = [
    ("tenants: {acme: {limits: {models: {m: LIMIT}}}}", ("acme", "", "m"), "tenants.acme.limits.models.m", False),
    (
        "tenants: {acme: {limits: {classes: {batch: LIMIT}}}}",
        ("acme", "batch", ""),
        "tenants.acme.limits.classes.batch",
        False,
    ),
    ("tenants: {acme: {limits: LIMIT}}", ("acme", "", ""), "tenants.acme.limits", False),
    ("tenants: {acme: {}}\nlimits: {per_tenant: LIMIT}", ("acme", "", ""), "limits.per_tenant", True),
    ("limits: {classes: {batch: LIMIT}}", ("", "batch", ""), "limits.classes.batch", False),
    ("limits: {models: {m: LIMIT}}", ("", "", "m"), "limits.models.m", False),
    ("limits: {global: LIMIT}", ("", "", ""), "limits.global", False),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("text", "level", "path", "default"), PLACES)
def test_a_limit_is_found_at_its_level_and_counts_there(
    text: str, level: Level, path: str, default: bool, kind: Kind
) -> None:
    given = decode(f"keys_file: k\n{text.replace('LIMIT', f'{{{kind}: 1/h}}')}\n".encode())
    found = {where: counted(given, kind, where) for where in levels_of("acme", "batch", "m")}
    assert found[level].quota == ONE
    assert (spelled(found[level].path), found[level].default) == (f"{path}.{kind}", default)
    assert {where for where, limit in found.items() if limit.quota is not None} == {level}
    book = LimitBook(given)
    book.charge("acme", "batch", "m", 1, 0.0)
    with pytest.raises(Refused) as refused:
        book.charge("acme", "batch", "m", 1, 0.0)
    assert refused.value.limit == f"{ONE.rate} {kind}"


def test_a_limit_of_its_own_replaces_the_default() -> None:
    given = decode(
        b"limits: {per_tenant: {requests: 1/h, tokens: 1/h}}\nkeys_file: k\ntenants: {acme: {limits: {requests: 2/h}}}"
    )
    assert counted(given, "requests", ("acme", "", "")) == Counted(("tenants", "acme", "limits", "requests"), TWO)
    assert counted(given, "tokens", ("acme", "", "")) == Counted(("limits", "per_tenant", "tokens"), ONE, True)


def test_unlimited_replaces_the_default_too() -> None:
    given = decode(
        b"limits: {per_tenant: {requests: 1/h}}\nkeys_file: k\ntenants: {acme: {limits: {requests: unlimited}}}"
    )
    assert counted(given, "requests", ("acme", "", "")) == Counted(("tenants", "acme", "limits", "requests"), None)


def test_where_there_is_no_limit_the_path_says_where_one_would_stand() -> None:
    assert counted(Policy(), "tokens", ("nobody", "", "")) == Counted(("tenants", "nobody", "limits", "tokens"), None)


def test_the_most_specific_level_comes_first() -> None:
    assert levels_of("t", "c", "m") == [
        ("t", "", "m"),
        ("t", "c", ""),
        ("t", "", ""),
        ("", "c", ""),
        ("", "", "m"),
        ("", "", ""),
    ]
