"""A web page on the data port: preflights are answered for the policy's origins, and every answer may be read there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import uvloop

from gateway.core.policy import Cors, Policy
from tests.faults.scripted import Answer, ScriptedEngine, ask, gateway_over, port_of, request

PAGE = "https://chat.example.com"
SHARED = Policy(cors=Cors(origins=(PAGE,)))
Ask = Callable[[bytes], Awaitable[Answer]]


def play(scene: Callable[[Ask], Awaitable[None]], policy: Policy = SHARED) -> None:
    async def main() -> None:
        async with ScriptedEngine("good").running() as engine, gateway_over([engine], policy) as gateway:
            await scene(lambda payload: ask(port_of(gateway), payload))

    uvloop.run(main())


def options(path: str, origin: str = PAGE, method: str = "POST") -> bytes:
    return (
        f"OPTIONS {path} HTTP/1.1\r\nhost: x\r\norigin: {origin}\r\naccess-control-request-method: {method}\r\n"
        "access-control-request-headers: authorization,content-type\r\nconnection: close\r\n\r\n"
    ).encode()


def test_a_preflight_from_an_allowed_origin() -> None:
    async def scene(ask: Ask) -> None:
        answer = await ask(options("/v1/chat/completions"))
        assert (answer.status, answer.body) == (204, b"")
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-allow-methods"] == "POST"
        assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
        assert answer.headers["access-control-max-age"] == "600"
        assert "content-length" not in answer.headers
        answer = await ask(options("/v1/models"))
        assert (answer.status, answer.headers["access-control-allow-methods"]) == (204, "GET, HEAD")

    play(scene)


@pytest.mark.parametrize("policy", [Policy(), SHARED], ids=["none allowed", "another allowed"])
def test_a_preflight_from_elsewhere_is_a_method_that_is_not_allowed(policy: Policy) -> None:
    async def scene(ask: Ask) -> None:
        answer = await ask(options("/v1/chat/completions", "https://evil.example"))
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
        assert "access-control-allow-origin" not in answer.headers

    play(scene, policy)


FROM_PAGE = f"\r\norigin: {PAGE}\r\n".encode()
CALLS = [
    (200, request()),
    (200, request(stream=True)),
    (404, request(model="nobody")),
    (400, request(max_tokens=-1)),
    (404, b"GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n"),
    (405, b"GET /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n"),
    (200, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"),
]


@pytest.mark.parametrize(("status", "payload"), CALLS)
def test_every_answer_may_be_read_by_the_page(status: int, payload: bytes) -> None:
    async def scene(ask: Ask) -> None:
        answer = await ask(payload.replace(b"\r\n", FROM_PAGE, 1))
        assert answer.status == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-weir-reason" in answer.headers["access-control-expose-headers"]
        assert answer.headers["vary"] == "origin"
        assert answer.headers["x-request-id"]
        answer = await ask(payload)
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["vary"] == "origin"

    play(scene)


def test_without_origins_nothing_is_said_of_them() -> None:
    async def scene(ask: Ask) -> None:
        answer = await ask(request().replace(b"\r\n", FROM_PAGE, 1))
        assert answer.status == 200
        assert not [name for name in answer.headers if name == "vary" or name.startswith("access-control")]

    play(scene, Policy())
