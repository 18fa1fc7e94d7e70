"""Control port over a real socket: routes, access, shutdown."""

from __future__ import annotations

import asyncio
import re

import pytest

from gateway.control import app
from gateway.control.app import control_app
from gateway.control.processes import ProcessView
from gateway.core.engines.engine import Engine
from gateway.core.engines.trouble import Trouble
from gateway.core.policy.policy import Policy
from gateway.shared.addresses import is_loopback, split_address
from gateway.shared.control.http1 import ControlPort
from gateway.shared.tasks import lasting
from gateway.shared.tokens import AcceptedTokens
from tests.control.parts import TOKEN, Parts, control_parts, play


def test_livez_says_that_the_process_answers() -> None:
    async def scene(gateway: Parts) -> None:
        answer = await gateway.get("/livez")
        assert (answer.status_code, answer.text) == (200, "ok\n")

    play(scene)


def test_readyz_follows_the_engines_and_the_drain() -> None:
    async def scene(gateway: Parts) -> None:
        answer = await gateway.get("/readyz")
        expected = "no engine is up\ne0 is not asked yet\ne1 is not asked yet\n"
        assert (answer.status_code, answer.text) == (503, expected)
        gateway.up("e1")
        gateway.fleet.engines["e0"].check(False, 1.0, Trouble("refused", "connection refused", 1.0))
        gateway.fleet.unasked.add("e0")
        answer = await gateway.get("/readyz")
        expected = "starting: 1 engines have not been asked yet\ne0 is down: connection refused\n"
        assert (answer.status_code, answer.text) == (503, expected)
        gateway.fleet.unasked.clear()
        answer = await gateway.get("/readyz")
        expected = "ok, 1 of 2 engines are up\ne0 is down: connection refused\n"
        assert (answer.status_code, answer.text) == (200, expected)

        async def fails() -> None:
            raise RuntimeError("gone")

        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        task = lasting("health checks of e0", fails)
        await asyncio.sleep(0)
        answer = await gateway.get("/readyz")
        line = r"ok, 1 of .*\nhealth checks of e0, since [-0-9]+T[:0-9]+Z: RuntimeError\('gone'\)\ne0 is down"
        assert re.match(line, answer.text), answer.text
        task.cancel()
        first = (await gateway.get("/fleet")).json()["engines"][0]
        assert (first["state"], first["last_error"]) == ("down: connection refused", "connection refused")
        gateway.dispatch.refuse_waiting()
        answer = await gateway.get("/readyz")
        assert (answer.status_code, answer.text) == (503, "shutting down\n")

    play(scene)


def test_readyz_counts_no_provider_as_the_data_port_does() -> None:
    async def scene(gateway: Parts) -> None:
        provider = Engine("provider:cloud", "https://api.example.com", Policy())
        provider.provider = "cloud"
        gateway.fleet.add(provider)
        provider.ready(0.0)
        answer = await gateway.get("/readyz")
        assert (answer.status_code, answer.text.partition("\n")[0]) == (503, "no engine is up")
        gateway.up("e0")
        assert (await gateway.get("/readyz")).text.startswith("ok, 1 of 2 engines are up\n")

    play(scene)


def test_readyz_tells_that_no_relay_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decider and its parent take no calls. A new decider's relays may be a moment away."""
    there = [
        ProcessView("parent", 1, 0.0, 0, 0),
        ProcessView("decider", 2, 0.0, 0, 0),
        ProcessView("relay", 3, 0.0, 0, 0),
    ]
    monkeypatch.setattr(app, "RELAYS_WITHIN", 0.05)

    async def scene(gateway: Parts) -> None:
        gateway.up("e0")
        gateway.up("e1")
        assert (await gateway.get("/readyz")).text == "ok, 2 of 2 engines are up\n"
        relay = there.pop()
        answer = await gateway.get("/readyz")
        expected = "ok, 2 of 2 engines are up\nno relay is there to take calls\n"
        assert (answer.status_code, answer.text) == (200, expected)
        await asyncio.sleep(0.06)
        answer = await gateway.get("/readyz")
        assert (answer.status_code, answer.text) == (503, "no relay is there to take calls\n")
        there.append(relay)
        assert (await gateway.get("/readyz")).status_code == 200

    play(scene, processes=lambda: there)


def test_metrics_are_the_exposition_as_it_is() -> None:
    async def scene(gateway: Parts) -> None:
        answer = await gateway.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert answer.content == b"weir_up 1\n"

    play(scene)


def test_what_is_not_there_is_404_and_what_a_path_does_not_take_is_405() -> None:
    async def scene(gateway: Parts) -> None:
        for path in ("/v1/models", "/fleet/x", "/fleet/", "/policy/", "/../etc/passwd", "/engines//drain/", "/x"):
            answer = await gateway.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        for path in ("/console/{name}", "/calls/{serial}", "/engines/{id}/drain", "/policy/try", "/sidecars/report"):
            assert path in answer.json()["error"]["message"]
        answer = await gateway.client.post(gateway.port.address + "/fleet", content=b"x" * 100_000)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
        answer = await gateway.get("/policy/reload")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        answer = await gateway.ask("PUT", "/drain")
        assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET, HEAD, POST")
        assert answer.json()["error"]["code"] == "method_not_allowed"
        assert (await gateway.client.head(gateway.port.address + "/livez")).status_code == 200

    play(scene)


@pytest.mark.parametrize(
    "path", ["/livez", "/readyz", "/metrics", "/fleet", "/calls", "/status", "/policy", "/drain", "/nothing"]
)
def test_with_a_token_nothing_is_answered_without_it(path: str) -> None:
    async def scene(gateway: Parts) -> None:
        gateway.up("e0")
        refused = [
            {},
            {"authorization": f"Bearer {TOKEN}x"},
            {"authorization": f"Bearer {TOKEN[:-1]}"},
            {"authorization": f"Bearer  {TOKEN}"},
            {"authorization": f"Basic {TOKEN}"},
            {"authorization": TOKEN},
            {"authorization": ""},
            {"x-api-key": TOKEN},
        ]
        bodies = set()
        for headers in refused:
            answer = await gateway.get(path, **headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            bodies.add(answer.content)
        assert len(bodies) == 1  # wrong and missing look the same
        twice = [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer other")]
        answer = await gateway.client.get(gateway.port.address + path, headers=twice)
        assert answer.status_code == 401
        answer = await gateway.get(path, authorization=f"bearer {TOKEN}")
        assert answer.status_code == (404 if path == "/nothing" else 200)

    play(scene, TOKEN)


def test_a_websocket_without_the_token_is_refused() -> None:
    async def scene(gateway: Parts) -> None:
        with gateway.connect() as client:
            client.sendall(
                b"GET /fleet HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
                b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            )
            answer = await asyncio.to_thread(client.recv, 4096)
            assert answer.split(b" ")[1] in {b"401", b"403"}

    play(scene, TOKEN)


def test_headers_are_bounded() -> None:
    async def scene(gateway: Parts) -> None:
        with gateway.connect() as client:
            # What arrives whole in one read (64 KiB) may pass; what goes on without an end is not gathered.
            client.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\nx-filler: " + b"x" * 100_000)
            answer = await asyncio.to_thread(client.recv, 4096)
            assert answer.startswith(b"HTTP/1.1 4")
        assert (await gateway.get("/livez")).status_code == 200

    play(scene)


def test_an_address_in_use_is_an_error_of_start() -> None:
    async def scene(gateway: Parts) -> None:
        app = control_app(control_parts(gateway.dispatch), AcceptedTokens(()))
        again = ControlPort(app, gateway.port.address.removeprefix("http://"))
        with pytest.raises(OSError, match="in use"):
            await again.start()
        await again.aclose()

    play(scene)


def test_it_ends_though_a_client_has_sent_half_a_request() -> None:
    async def main() -> None:
        gateway = Parts()
        await gateway.port.start()
        with gateway.connect() as client:
            client.sendall(b"GET /livez HTTP/1.1\r\nhost: x")
            assert (await gateway.get("/livez")).status_code == 200
            await gateway.client.aclose()
            async with asyncio.timeout(60):
                await gateway.port.aclose()
        with pytest.raises(OSError, match="refused"):
            gateway.connect()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:8001", ("127.0.0.1", 8001)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:8001", ("::1", 8001)),
        ("10.0.0.1:65535", ("10.0.0.1", 65_535)),
    ],
)
def test_addresses(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize(
    "address", ["", "8001", ":8001", "h:", "h:x", "h:-1", "h:65536", "h:\u0661", "::1:8001", "[::1:8001", "::1]:8001"]
)
def test_bad_addresses(address: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        split_address(address)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True),
        ("127.8.8.8:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("my-host:1", False),
        ("localhost.evil.example:1", False),
    ],
)
def test_loopback(address: str, expected: bool) -> None:
    assert is_loopback(split_address(address)[0]) is expected


def test_ipv6_has_a_url_of_its_own() -> None:
    async def main() -> None:
        gateway = Parts()
        app = control_app(control_parts(gateway.dispatch), AcceptedTokens(()))
        port = ControlPort(app, "[::1]:0")
        try:
            await port.start()
        except OSError as error:
            pytest.skip(f"no IPv6 loopback on this machine: {error}")
        assert port.address.startswith("http://[::1]:")
        assert (await gateway.client.get(port.address + "/livez")).status_code == 200
        await gateway.client.aclose()
        await port.aclose()

    asyncio.run(main())
