"""Orders for sidecars that the control port passes on: to those that have reported, with the order token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import httpx
import pytest

from gateway.core.policy.policy import FleetPolicy, Policy, SidecarsPolicy
from gateway.decider.loading import Configuration
from gateway.serve.assembly import Gateway
from gateway.shared.protocol import CapacityReport, ModelReport, encode
from tests.control.parts import TOKEN

CONTROL = "http://127.0.0.1:9000"
POLICY = Policy(fleet=FleetPolicy(sidecars=SidecarsPolicy()))


async def body() -> AsyncIterator[bytes]:
    """As it comes over a socket."""
    yield b'{"model":{}}'


def ordered(status: int, sidecar: str, profile: str) -> tuple[int, bytes, list[str]]:
    """What comes of an order, and what the sidecar was asked."""
    asked: list[str] = []

    async def scene() -> tuple[int, bytes]:
        gateway = Gateway(Configuration(POLICY, order_tokens=(TOKEN,)), (), None, random.Random(1), say=lambda _: None)

        async def played(request: httpx.Request) -> httpx.Response:
            asked.append(f"{request.method} {request.url} {request.headers['authorization']}")
            if not status:
                raise httpx.ConnectError("nobody listens")
            return httpx.Response(status, content=body())

        gateway.waking.transport = httpx.MockTransport(played)
        model = ModelReport(profile="a b", model="m", state="running", ready_in=0.0)
        report = CapacityReport(sidecar="gpu", boot="b", sequence=1, control=CONTROL, models=(model,))
        gateway.sidecars.report(encode(report), local=True)
        try:
            return await gateway.waking.order(sidecar, profile, "sleep")
        finally:
            await gateway.aclose()

    return (*asyncio.run(scene()), asked)


def test_an_order_goes_to_the_sidecar_with_its_token_and_its_answer_comes_back() -> None:
    status, told, asked = ordered(409, "gpu", "a b")
    assert (status, told) == (409, b'{"model":{}}')
    assert asked == ["POST http://127.0.0.1:9000/models/a%20b/sleep Bearer " + TOKEN]


@pytest.mark.parametrize(("sidecar", "profile"), [("gpu", "other"), ("other", "a b")])
def test_only_what_was_reported_can_be_ordered(sidecar: str, profile: str) -> None:
    with pytest.raises(LookupError, match="has reported a profile"):
        ordered(200, sidecar, profile)


def test_a_sidecar_that_does_not_answer_is_named() -> None:
    with pytest.raises(ConnectionError, match="gpu did not answer: nobody listens"):
        ordered(0, "gpu", "a b")


def test_a_refused_token_is_not_taken_for_the_operators_own() -> None:
    with pytest.raises(ConnectionError, match="order token"):
        ordered(401, "gpu", "a b")
