"""Authentication of the control port: operators by token or from this machine; no clients, no foreign web pages."""

from __future__ import annotations

import pytest

from tests.control.parts import TOKEN, USER_KEY, Parts, play

PATHS = ["/", "/livez", "/fleet", "/policy", "/calls", "/drain", "/nothing"]


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize("path", PATHS)
def test_a_user_s_key_opens_nothing(path: str, token: str | None) -> None:
    async def scene(gateway: Parts) -> None:
        for headers in (
            {"authorization": f"Bearer {USER_KEY}"},
            {"authorization": f"bearer  {USER_KEY}"},
            {"authorization": USER_KEY},
            {"x_api_key": USER_KEY},
            {"authorization": f"Bearer {TOKEN}", "x_api_key": USER_KEY},
        ):
            answer = await gateway.get(path, **headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_allowed")
            assert "for operators" in answer.json()["error"]["message"]
            assert USER_KEY not in answer.text

    play(scene, token)


def test_other_keys_are_no_matter_where_there_is_no_token() -> None:
    async def scene(gateway: Parts) -> None:
        assert (await gateway.get("/livez", authorization="Bearer none")).status_code == 200
        assert (await gateway.get("/livez", authorization="")).status_code == 200

    play(scene)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:9", 200),
        ("127.0.0.1:8001", 200),
        ("127.9.9.9", 200),
        ("[::1]:8001", 200),
        ("evil.example", 421),
        ("evil.example:8001", 421),
        ("localhost.evil.example:8001", 421),
        ("127.0.0.1.evil.example", 421),
        ("10.0.0.1:8001", 421),
        ("0.0.0.0:8001", 421),
        ("[::]:8001", 421),
        ("[::1", 200),
        ("", 421),
    ],
)
def test_without_a_token_only_loopback_names_are_answered(host: str, status: int) -> None:
    """A page whose own name was made to point here (DNS rebinding) says that name in Host."""

    async def scene(gateway: Parts) -> None:
        for path in ("/livez", "/fleet", "/"):
            assert (await gateway.get(path, host=host)).status_code == status
        assert (await gateway.post("/drain", host=host)).status_code == status
        assert gateway.dispatch.leaving is (status == 200)

    play(scene)


def test_with_a_token_any_name_will_do() -> None:
    async def scene(gateway: Parts) -> None:
        assert (await gateway.get("/livez", host="weir.internal", authorization=f"Bearer {TOKEN}")).status_code == 200
        assert (await gateway.get("/livez", host="weir.internal")).status_code == 401

    play(scene, TOKEN)


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "null"},
        {"origin": ""},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"origin": "https://evil.example", "sec_fetch_site": "same-origin"},
    ],
    ids=str,
)
def test_other_pages_get_nothing_and_change_nothing(headers: dict[str, str], token: str | None) -> None:
    async def scene(gateway: Parts) -> None:
        key = {} if token is None else {"authorization": f"Bearer {token}"}
        for method, path in (("POST", "/drain"), ("POST", "/policy/reload"), ("GET", "/fleet"), ("OPTIONS", "/drain")):
            answer = await gateway.ask(method, path, **headers, **key)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_origin")
            assert "access-control-allow-origin" not in answer.headers
        assert gateway.dispatch.leaving is False

    play(scene, token)


def test_our_own_page_may_ask() -> None:
    async def scene(gateway: Parts) -> None:
        own = gateway.port.address
        answer = await gateway.get("/fleet", sec_fetch_site="same-origin")
        assert answer.status_code == 200
        assert (await gateway.post("/drain", origin=own, sec_fetch_site="same-origin")).status_code == 200
        assert (await gateway.get("/", sec_fetch_site="none")).status_code == 200
        assert (await gateway.get("/", sec_fetch_site="cross-site")).status_code == 200, "a link may lead here"
        assert (await gateway.get("/", origin="https://evil.example")).status_code == 403

    play(scene)


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_kept_sniffed_or_embedded(path: str) -> None:
    async def scene(gateway: Parts) -> None:
        for host in ("localhost", "evil.example"):
            answer = await gateway.get(path, host=host)
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"

    play(scene)
