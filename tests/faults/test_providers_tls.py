"""Providers over TLS: certificates that are right, untrusted, for another name or expired, and plain HTTP."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, closing
from pathlib import Path

import pytest
import uvloop
from msgspec import structs

from gateway.core.engines.origin import origin_of
from gateway.core.policy.routes import ModelRoute
from gateway.serve.assembly import Gateway
from gateway.serve.fleet_engines import client_settings
from gateway.upstream.client import Client, ClientSettings, EngineError
from gateway.upstream.names import Names
from tests.certificates import made
from tests.faults.scripted import ScriptedEngine, ask, gateway_over, port_of, settled
from tests.faults.test_providers import Moving, asked, policy_of, spent

pytestmark = pytest.mark.slow  # it makes certificates and opens sockets

Body = Callable[[Gateway, ScriptedEngine, ScriptedEngine], Awaitable[None]]
TRUSTED = "the certificate that the system trusts"


@pytest.fixture
def over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def scenario(body: Body, name: str = TRUSTED, host: str = "localhost", *, expired: bool = False) -> None:
        """Run `body` over two providers: cloud, whose certificate is so, and spare, whose certificate is right."""
        right = made(tmp_path, TRUSTED)
        shown = right if name == TRUSTED else made(tmp_path, name, host=host, expired=expired)
        trusted = [TRUSTED] if name == "unknown" else {TRUSTED, name}
        (tmp_path / "system.pem").write_text("".join((tmp_path / f"{each}.pem").read_text() for each in trusted))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "system.pem"))

        async def main() -> None:
            async with AsyncExitStack() as stack:
                cloud = await stack.enter_async_context(ScriptedEngine("good", tls=shown).running())
                spare = await stack.enter_async_context(ScriptedEngine("good", tls=right).running())
                policy = policy_of(cloud.port, url=f"https://localhost:{cloud.port}/v1")
                second = structs.replace(
                    policy.providers["cloud"], url=f"https://localhost:{spare.port}/v1", models={"nano": "n"}
                )
                route = ModelRoute(members=policy.models["support"].members, fallback=("mini", "nano"))
                policy = structs.replace(
                    policy, providers={**policy.providers, "spare": second}, models={"support": route}, retries=1.0
                )
                gateway = await stack.enter_async_context(gateway_over([], policy))
                await body(gateway, cloud, spare)
                await settled(gateway)

        uvloop.run(main())

    return scenario


@pytest.mark.parametrize("stream", [False, True])
def test_a_certificate_of_the_systems_authorities(over: Callable[..., None], stream: bool) -> None:
    async def body(gateway: Gateway, cloud: ScriptedEngine, spare: ScriptedEngine) -> None:
        answer = await ask(port_of(gateway), asked("mini", stream=stream))
        assert (answer.status, answer.headers["x-weir-engine"]) == (200, "cloud")
        assert b"\r\nauthorization: Bearer key-of-cloud\r\n" in cloud.heads[0]
        assert f"\r\nhost: localhost:{cloud.port}\r\n".encode() in cloud.heads[0]

    over(body)


@pytest.mark.parametrize(
    ("name", "more", "told"),
    [
        ("unknown", {}, "its TLS certificate is not trusted"),
        ("elsewhere", {"host": "api.example.com"}, "its TLS certificate is for another name"),
        ("old", {"expired": True}, "its TLS certificate has expired"),
    ],
)
def test_a_certificate_that_is_wrong_gets_neither_key_nor_call(
    over: Callable[..., None], name: str, more: dict[str, object], told: str
) -> None:
    async def body(gateway: Gateway, cloud: ScriptedEngine, spare: ScriptedEngine) -> None:
        answer = await ask(port_of(gateway), asked("mini"))
        assert answer.status == 502
        assert json.loads(answer.body)["error"]["message"].startswith(f"Engine cloud failed: {told}.")
        assert not cloud.heads
        assert spent(gateway) == 0
        assert told in gateway.fleet.engines["provider:cloud"].health.failed_call
        answer = await ask(port_of(gateway), asked("support"))
        assert (answer.status, answer.headers["x-weir-model"], answer.headers["x-weir-engine"]) == (
            200,
            "nano",
            "spare",
        )
        assert not cloud.heads

    over(body, name, **more)


@pytest.mark.parametrize(
    ("address", "sent", "words"),
    [("127.0.0.1", 1, ""), ("93.184.216.34", 0, "which is no private address")],
)
def test_a_key_goes_out_in_the_clear_to_addresses_of_the_house_alone(address: str, sent: int, words: str) -> None:
    async def main() -> None:
        async with ScriptedEngine("good").running() as provider:
            url = f"http://api.example.com:{provider.port}/v1"
            settings = client_settings(policy_of(provider.port, url=url), "provider:cloud")
            settings = structs.replace(settings, connect_timeout=60.0)
            client = Client(origin_of("provider:cloud", url), settings, api_key="k", names=Moving(address))
            with closing(client), contextlib.ExitStack() as stack:
                if not sent:
                    stack.enter_context(pytest.raises(EngineError, match=words))
                reply = await client.send(b"POST", b"/x", b"", b"{}", timeout=60.0)
                reply.close()
            assert len(provider.heads) == sent

    uvloop.run(main())


class Both(Names):
    """Name servers by which a host has an address that nothing listens on, and then the right one."""

    async def addresses(self, host: str) -> tuple[str, ...]:
        return ("127.0.0.2", "127.0.0.1")


def test_a_certificate_is_blamed_where_another_address_of_the_host_refuses(tmp_path: Path) -> None:
    async def main() -> None:
        async with ScriptedEngine("good", tls=made(tmp_path)).running() as provider:
            url = f"https://localhost:{provider.port}/v1"
            client = Client(origin_of("provider:cloud", url), ClientSettings(), names=Both())
            with closing(client), pytest.raises(EngineError, match="not trusted") as caught:
                await client.send(b"POST", b"/x", b"", b"{}", timeout=60.0)
            assert caught.value.reason == "tls_untrusted"

    uvloop.run(main())
