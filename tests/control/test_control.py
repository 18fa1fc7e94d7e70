"""The control port over a real socket: what it answers, to whom, and how it ends."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable

import httpx
import pytest

from gateway.control.app import control_app
from gateway.control.listener import ControlPort, is_loopback, split_address
from gateway.core.fleet import Engine, Fleet
from gateway.core.policy import Policy
from gateway.core.vllm import EngineSample, ModelCard
from gateway.dispatch import Dispatch

TOKEN = "correct-horse-battery-staple"  # noqa: S105 # a test's own


class Gateway:
    """The parts the control port reads, and a client for it."""

    def __init__(self, token: str | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.fleet = Fleet()
        for index in range(2):
            self.fleet.add(Engine(f"e{index}", f"http://127.0.0.1:{index + 1}", Policy()))
        self.dispatch = Dispatch(self.fleet, Policy(), random.Random(1), loop.time)
        app = control_app(self.fleet, self.dispatch, lambda: b"weir_up 1\n", token, loop.time)
        self.port = ControlPort(app, "127.0.0.1:0")
        self.client = httpx.AsyncClient(trust_env=False)

    def up(self, id: str) -> Engine:
        engine = self.fleet.engines[id]
        self.fleet.has_models(engine, [ModelCard(id="m", max_model_len=4096)])
        self.fleet.health(engine, True, asyncio.get_running_loop().time())
        return engine

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.client.get(self.port.address + path, headers=headers)

    def connect(self) -> socket.socket:
        host, port = split_address(self.port.address.removeprefix("http://"))
        return socket.create_connection((host, port), timeout=10)


def play(scene: Callable[[Gateway], Awaitable[None]], token: str | None = None) -> None:
    async def main() -> None:
        gateway = Gateway(token)
        await gateway.port.start()
        try:
            await scene(gateway)
        finally:
            await gateway.client.aclose()
            await gateway.port.aclose()

    asyncio.run(main())


def test_livez_says_that_the_process_answers() -> None:
    async def scene(gateway: Gateway) -> None:
        answer = await gateway.get("/livez")
        assert (answer.status_code, answer.text) == (200, "ok\n")

    play(scene)


def test_readyz_follows_the_engines_and_the_drain() -> None:
    async def scene(gateway: Gateway) -> None:
        answer = await gateway.get("/readyz")
        assert (answer.status_code, answer.text) == (503, "no engine is up\n")
        gateway.up("e1")
        answer = await gateway.get("/readyz")
        assert (answer.status_code, answer.text) == (200, "ok, 1 of 2 engines are up\n")
        gateway.dispatch.refuse_waiting()
        answer = await gateway.get("/readyz")
        assert (answer.status_code, answer.text) == (503, "shutting down\n")

    play(scene)


def test_metrics_are_the_exposition_as_it_is() -> None:
    async def scene(gateway: Gateway) -> None:
        answer = await gateway.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert answer.content == b"weir_up 1\n"

    play(scene)


def test_fleet_tells_what_is_known_and_promised() -> None:
    async def scene(gateway: Gateway) -> None:
        now = asyncio.get_running_loop().time()
        engine = gateway.up("e1")
        sample = EngineSample(running=2, waiting=0, kv_usage=0.1, capacity_tokens=10_000)
        gateway.fleet.sampled(engine, sample, now - 0.5)
        hold = engine.hold(3000, 2000, now)
        view = (await gateway.get("/fleet")).json()
        first, second = view["engines"]
        assert (first["up"], first["running"], first["sample_age_s"], first["models"]) == (False, None, None, [])
        assert 0.5 <= second.pop("sample_age_s") < 30
        assert second == {
            "id": "e1",
            "url": "http://127.0.0.1:2",
            "up": True,
            "models": ["m"],
            "capacity_tokens": 10_000,
            "budget_tokens": 8000,
            "held_tokens": 3000,
            "in_flight": 1,
            "slots": 256,
            "prefill_rate": 10_000.0,
            "running": 2,
            "waiting": 0,
            "kv_usage": 0.1,
        }
        (model,) = view["models"]
        assert model == {
            "id": "m",
            "max_model_len": 4096,
            "engines": ["e1"],
            "spare_tokens": 8000 - 3000 - engine.excess,
            "queued_calls": 0,
            "queued_tokens": 0,
            "wait_s": 0.0,
        }
        assert view["queues"] == []
        assert view["running"] == dict.fromkeys(Policy().classes, 0)
        assert view["draining"] is False
        hold.release()

    play(scene)


def test_what_is_not_there_is_404_and_what_is_not_get_is_405() -> None:
    async def scene(gateway: Gateway) -> None:
        for path in ("/", "/v1/models", "/fleet/x", "/../etc/passwd"):
            answer = await gateway.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        answer = await gateway.client.post(gateway.port.address + "/fleet", content=b"x" * 100_000)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
        assert (await gateway.client.head(gateway.port.address + "/livez")).status_code == 200

    play(scene)


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics", "/fleet", "/nothing"])
def test_with_a_token_nothing_is_answered_without_it(path: str) -> None:
    async def scene(gateway: Gateway) -> None:
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
    async def scene(gateway: Gateway) -> None:
        with gateway.connect() as client:
            client.sendall(
                b"GET /fleet HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
                b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            )
            answer = await asyncio.to_thread(client.recv, 4096)
            assert answer.split(b" ")[1] in {b"401", b"403"}

    play(scene, TOKEN)


def test_headers_are_bounded() -> None:
    async def scene(gateway: Gateway) -> None:
        with gateway.connect() as client:
            # What arrives whole in one read (64 KiB) may pass; what goes on without an end is not gathered.
            client.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\nx-filler: " + b"x" * 100_000)
            answer = await asyncio.to_thread(client.recv, 4096)
            assert answer.startswith(b"HTTP/1.1 4")
        assert (await gateway.get("/livez")).status_code == 200

    play(scene)


def test_an_address_in_use_is_an_error_of_start() -> None:
    async def scene(gateway: Gateway) -> None:
        app = control_app(gateway.fleet, gateway.dispatch, bytes, None, asyncio.get_running_loop().time)
        again = ControlPort(app, gateway.port.address.removeprefix("http://"))
        with pytest.raises(OSError, match="in use"):
            await again.start()
        await again.aclose()

    play(scene)


def test_it_ends_though_a_client_has_sent_half_a_request() -> None:
    async def main() -> None:
        gateway = Gateway()
        await gateway.port.start()
        with gateway.connect() as client:
            client.sendall(b"GET /livez HTTP/1.1\r\nhost: x")
            assert (await gateway.get("/livez")).status_code == 200
            await gateway.client.aclose()
            async with asyncio.timeout(5):
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
    assert is_loopback(address) is expected


def test_ipv6_has_a_url_of_its_own() -> None:
    async def main() -> None:
        gateway = Gateway()
        app = control_app(gateway.fleet, gateway.dispatch, bytes, None, asyncio.get_running_loop().time)
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
