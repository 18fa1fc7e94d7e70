"""CORS on the data port: preflights for the policy's origins, and readable answers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from hashlib import sha256

import pytest
import uvloop

from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import Tenant
from tests.faults.scripted import Answer, ScriptedEngine, ask, gateway_over, port_of, request

PAGE = "https://chat.example.com"
SHARED = Policy(cors=(PAGE,))
Ask = Callable[[bytes], Awaitable[Answer]]


def play(scene: Callable[[Ask], Awaitable[None]], policy: Policy = SHARED) -> None:
    async def main() -> None:
        async with ScriptedEngine("good").running() as engine, gateway_over([engine], policy) as gateway:
            await scene(lambda payload: ask(port_of(gateway), payload))

    uvloop.run(main())


def options(path: str, origin: str = PAGE, method: str = "POST") -> bytes:
    return (
        f"OPTIONS {path} HTTP/1.1\r\nhost: localhost\r\norigin: {origin}\r\naccess-control-request-method: {method}\r\n"
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
    (404, b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    (405, b"GET /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    (200, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"),
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
        assert answer.status == 403  # no key is asked for: it may be a page that makes calls unasked
        assert json.loads(answer.body)["error"]["code"] == "cross_origin"
        assert not [name for name in answer.headers if name == "vary" or name.startswith("access-control")]

    play(scene, Policy())


KEY = "key-of-acme"
KEYED = Policy(tenants={"acme": Tenant(keys=(sha256(KEY.encode()).hexdigest(),))})


def test_a_page_that_was_led_here_makes_no_calls() -> None:
    async def scene(ask: Ask) -> None:
        answer = await ask(request().replace(b"localhost", b"evil.example"))
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (403, "misdirected_request")
        assert (await ask(request().replace(b"localhost", b"127.0.0.1:8080"))).status == 200
        assert (await ask(b"GET /health HTTP/1.1\r\nhost: evil.example\r\n\r\n")).status == 200
        models = b"GET /v1/models HTTP/1.1\r\nhost: %b\r\n\r\n"
        assert (await ask(models % b"evil.example")).status == 403
        assert (await ask(models % b"localhost")).status == 200

    play(scene, Policy())


def test_where_a_key_is_asked_for_hosts_and_origins_do_not_matter() -> None:
    async def scene(ask: Ask) -> None:
        authorized = request().replace(b"localhost", b"evil.example\r\nauthorization: Bearer " + KEY.encode())
        assert (await ask(authorized)).status == 200
        assert (await ask(authorized.replace(b"\r\n", FROM_PAGE, 1))).status == 200

    play(scene, KEYED)


@pytest.mark.parametrize("line", [b"", b"content-type: text/plain\r\n", b"content-type: \r\n"])
def test_a_body_that_needs_no_preflight_is_refused(line: bytes) -> None:
    async def scene(ask: Ask) -> None:
        answer = await ask(request().replace(b"content-type: application/json\r\n", line))
        error = json.loads(answer.body)["error"]
        assert (answer.status, error["param"]) == (400, "content-type")
        assert error["message"].startswith("content-type must be application/json, found")

    play(scene, Policy())


@pytest.mark.parametrize(
    "line", [b"authorization: Bearer x", b"x-api-key: x", b"content-type: text/plain", b"x-weir-class: batch"]
)
def test_what_decides_is_said_once(line: bytes) -> None:
    async def scene(ask: Ask) -> None:
        twice = request().replace(b"\r\n", b"\r\n" + line + b"\r\n" + line + b"\r\n", 1)
        assert (await ask(twice)).status == 400

    play(scene, Policy())


def test_a_clients_own_tenant_header_before_a_proxys_is_nobodys() -> None:
    tenants = {"acme": Tenant(), "globex": Tenant()}
    behind = Policy(tenants=tenants, trusted_proxies=("127.0.0.1",))

    async def scene(ask: Ask) -> None:
        def named(*names: bytes) -> bytes:
            lines = b"".join(b"X-Tenant: %b\r\n" % name for name in names)
            return request().replace(b"\r\n", b"\r\n" + lines, 1)

        assert (await ask(named(b"globex"))).status == 200
        assert (await ask(named(b"acme", b"globex"))).status == 401
        assert (await ask(named(b"globex", b"globex"))).status == 401

    play(scene, behind)
