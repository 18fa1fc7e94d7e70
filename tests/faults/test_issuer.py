"""Requests whose token needs keys that are not here yet, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from gateway.core.policy.auth import AuthPolicy
from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import Tenant
from gateway.relay import issuer as of_issuer
from gateway.serve.run import Gateway
from tests.faults.scripted import ScriptedEngine, ask, gateway_over, port_of, request
from tests.tokens import AUDIENCE, ISSUER, KeyPair, KeyServer, key_set

ONE, TWO = KeyPair("one"), KeyPair("two")


def shown(token: str, path: str = "") -> bytes:
    """A call, or a GET of `path`, with the token."""
    sent = f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode() if path else request()
    return sent.replace(b"host: localhost\r\n", f"host: localhost\r\nauthorization: Bearer {token}\r\n".encode(), 1)


def run(scenario: Callable[[Gateway, KeyServer], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_issuer, "AGAIN", 0.0)

    async def main(server: KeyServer) -> None:
        auth = AuthPolicy(issuer=ISSUER, audience=AUDIENCE, jwks=server.url)
        engine = ScriptedEngine("good")
        policy = Policy(tenants={"acme": Tenant()}, auth=auth)
        async with engine.running(), gateway_over([engine], policy) as gateway:
            await asyncio.wait_for(scenario(gateway, server), 20)

    with KeyServer(ONE) as server:
        uvloop.run(main(server))


@pytest.mark.parametrize("path", ["", "/v1/models", "/v1/models/m"])
def test_the_first_token_of_a_new_key_is_accepted(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(gateway: Gateway, server: KeyServer) -> None:
        assert (await ask(port_of(gateway), shown(ONE.token(), path))).status == 200
        server.answer = (200, key_set(TWO))
        assert (await ask(port_of(gateway), shown(TWO.token(), path))).status == 200
        refused = await ask(port_of(gateway), shown(ONE.token(), path))
        assert refused.status == 401
        assert json.loads(refused.body)["error"]["code"] == "invalid_api_key"

    run(scenario, monkeypatch)
