"""Tokens of an issuer at a running gateway, in one process and with relays: accepted, refused, keys rotated."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from loadtest.processes import Gateway, until
from tests.e2e.traffic import CHAT, QUICK, body, sha256
from tests.tokens import AUDIENCE, ISSUER, KeyPair, KeyServer, key_set

pytestmark = pytest.mark.slow  # processes and seconds

ONE, TWO = KeyPair("one"), KeyPair("two")
NONE = base64.urlsafe_b64encode(b'{"alg":"none","kid":"one"}').decode().rstrip("=")
Ask = Callable[..., httpx.Response]


@pytest.fixture(params=[(), ("--workers", "2")], ids=["one process", "relays"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Gateway, KeyServer, Ask]]:
    with KeyServer(ONE) as server:
        auth = {"issuer": ISSUER, "audience": AUDIENCE, "jwks_url": server.url, "class_claim": "class"}
        tenants = {"acme": {"keys": [sha256("weir-key")]}, "globex": {"models": ["other"]}}
        (tmp_path / "policy.yaml").write_text(json.dumps({"auth": auth, "tenants": tenants, "fleet": QUICK}))
        words = ("--policy", str(tmp_path / "policy.yaml"), "--engine", "sim", *request.param)
        with Gateway(tmp_path / "log", *words) as gateway, httpx.Client(trust_env=False, timeout=20) as client:
            model = client.get(f"{gateway.url}/v1/models", headers={"x-api-key": "weir-key"}).json()["data"][0]["id"]

            def ask(token: str, **headers: str) -> httpx.Response:
                given = {"authorization": f"Bearer {token}", **{k.replace("_", "-"): v for k, v in headers.items()}}
                return client.post(f"{gateway.url}{CHAT}", json=body(model=model), headers=given)

            yield gateway, server, ask
            assert gateway.child.alive
            told = gateway.child.output()
            assert "Traceback" not in told
            assert "eyJ" not in told  # no token in a log


def test_a_token_is_a_key_until_its_end_or_that_of_its_issuers_key(site: tuple[Gateway, KeyServer, Ask]) -> None:
    gateway, server, ask = site
    good = ONE.token()
    first = ask(good)
    assert first.status_code == 200, first.text
    assert ask(good).headers["x-weir-class"] == "default"
    assert ask("weir-key").status_code == 200
    claimed = ONE.token(**{"class": "batch"})
    assert ask(claimed).headers["x-weir-class"] == "batch"
    assert ask(claimed, x_weir_class="interactive").headers["x-weir-class"] == "batch"
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=good, max_retries=0) as client:
        assert client.models.list().data
    assert ask(ONE.token(tenant="globex")).status_code == 403
    for token, check in (
        (ONE.token(iss="https://evil.example.com/"), "(`iss`)"),
        (ONE.token(aud="other"), "(`aud`)"),
        (ONE.token(exp=time.time() - 1), "(`exp`)"),
        (ONE.token(exp=None), "(`exp`)"),
        (ONE.token(iat=time.time() + 60), "(`iat`)"),
        (ONE.token(tenant="nobody"), "names no tenant"),
        (f"{NONE}.{ONE.token().split('.')[1]}.", "HMAC are not accepted"),
        (KeyPair("one").token(), "signature"),
    ):
        answer = ask(token)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert check in answer.json()["error"]["message"]
        assert token not in answer.text
    new = TWO.token()
    assert ask(new).status_code == 401
    server.answer = (200, key_set(TWO))
    assert until(lambda: ask(new).status_code == 200, 20.0, every=0.2) is not None
    assert until(lambda: ask(good).status_code == 401, 20.0, every=0.2) is not None
    # A refusal ends its connection, so another relay may have the next, and has still to read the new keys.
    assert until(lambda: ask(new).status_code == 200, 20.0, every=0.2) is not None
    server.answer = (500, b"")
    assert ask(TWO.token(jti="later")).status_code == 200
