"""Console's questions about the policy, its tenants and limits: real sockets, bounded, guarded."""

from __future__ import annotations

from typing import Any

from gateway.control.console.reading import tenant_entries
from gateway.core.admission.limits import LimitBook
from gateway.core.policy.file import decode
from tests.control.parts import TOKEN, Parts, play

POLICY = decode(
    b"tenants: {acme: {weight: 3, limits: {requests: 60/min}, keys: [" + b"ab" * 32 + b"]}, other: {}}\n"
    b"limits: {global: {tokens: 1000/min}}\n"
)
ADMIN = {"authorization": f"Bearer {TOKEN}"}


def test_the_last_change_is_told_without_keys() -> None:
    async def scene(gateway: Parts) -> None:
        assert (await gateway.get("/policy/diff")).status_code == 401
        text = (await gateway.get("/policy/diff", **ADMIN)).text
        assert "-    weight: 3.0" in text.replace("weight: 3\n", "weight: 3.0\n")
        assert "abababab" in text
        assert "ab" * 8 not in text

    play(scene, TOKEN, previous=lambda: POLICY)


def test_without_a_change_there_is_nothing_to_tell() -> None:
    async def scene(gateway: Parts) -> None:
        assert (await gateway.get("/policy/diff")).text == ""

    play(scene)


def test_tenants_are_told_with_what_their_limits_have_left() -> None:
    book = LimitBook(POLICY)
    book.charge("acme", "batch", "m", 400, 0.0)
    told: dict[str, Any] = dict(tenant_entries(POLICY.tenants, {"other": (3, 2, 50)}, book.buckets(), 0.0))
    assert told["tenant/other"]["order"] == 0
    assert told["tenant/acme"]["share"] == 0.75
    assert told["tenant/acme"]["keys"] == ["ab" * 4]
    assert told["tenant/acme"]["limits"] == [["requests", "", "60/min", 60, 59]]
    assert told["limits"] == [["tokens", "", "1k/min", 1000, 600]]
