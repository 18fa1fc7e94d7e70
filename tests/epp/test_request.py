"""Client's request as a proxy tells of it: whose address its client has."""

from __future__ import annotations

import asyncio

import pytest

from gateway.relay.epp.request import UNKNOWN, request_of


@pytest.mark.parametrize(
    ("told", "peer"),
    [
        ({}, UNKNOWN),
        ({"x-forwarded-for": "10.0.0.5, 192.0.2.7"}, "192.0.2.7"),
        ({"x-envoy-external-address": "192.0.2.7", "x-forwarded-for": "192.0.2.7, 10.0.0.5"}, "192.0.2.7"),
        # Envoy leaves an internal client's own header as it is.
        (
            {"x-envoy-external-address": "10.0.0.5", "x-forwarded-for": "10.0.0.9", "x-envoy-internal": "true"},
            "10.0.0.9",
        ),
    ],
)
def test_no_client_can_claim_another_address(told: dict[str, str], peer: str) -> None:
    head = {b":method": b"POST", b":path": b"/v1/chat/completions"}
    head |= {name.encode(): value.encode() for name, value in told.items()}

    async def main() -> None:
        assert request_of(head, (), ended=False).peer == peer

    asyncio.run(main())
