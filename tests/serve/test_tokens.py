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
from tests.plain_http import NOBODY
from tests.tokens import AUDIENCE, ISSUER, KeyPair, KeyServer, key_set

pytestmark = pytest.mark.slow  # processes and seconds

ONE, TWO = KeyPair("one"), KeyPair("two")
NONE, ODD = (
    base64.urlsafe_b64encode(b'{"alg":%b,"kid":"one"}' % alg).decode().rstrip("=") for alg in (b'"none"', b'["ES256"]')
)
Ask = Callable[..., httpx.Response]


@pytest.fixture(params=[(), ("--workers", "2")], ids=["one process", "relays"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Gateway, KeyServer, Ask]]:
    with KeyServer(ONE) as server:
        auth = {"issuer": ISSUER, "audience": AUDIENCE, "jwks": server.url, "class_claim": "class"}
        tenants = {"acme": {"keys": [sha256("weir-key")]}, "globex": {"models": ["other"]}}
        policy = {"auth": auth, "tenants": tenants, "fleet": QUICK, "storage": "kept", "batches": {}}
        policy["classes"] = {"interactive": {}, "default": {}, "batch": {}, "bulk": {}}
        (tmp_path / "policy.yaml").write_text(json.dumps(policy))
        words = ("--policy", str(tmp_path / "policy.yaml"), "--engine", "sim", *request.param)
        with (
            Gateway(tmp_path / "log", *words) as gateway,
            httpx.Client(trust_env=False, verify=NOBODY, timeout=60) as client,
        ):
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
    ahead = time.time() + 4.0  # as an issuer's clock may be
    assert ask(ONE.token(iat=ahead, nbf=ahead)).status_code == 200
    for token, check in (
        (ONE.token(iss="https://evil.example.com/"), "(`iss`)"),
        (ONE.token(aud="other"), "(`aud`)"),
        (ONE.token(exp=time.time() - 1), "(`exp`)"),
        (ONE.token(exp=None), "(`exp`)"),
        (ONE.token(iat=time.time() + 60), "(`iat`)"),
        (ONE.token(nbf=time.time() + 60), "(`nbf`)"),
        (ONE.token(tenant="nobody"), "names no tenant"),
        (f"{NONE}.{ONE.token().split('.')[1]}.", "HMAC are not accepted"),
        (f"{ODD}.{ONE.token().split('.')[1]}.", "HMAC are not accepted"),
        (KeyPair("one").token(), "signature"),
    ):
        answer = ask(token)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert check in answer.json()["error"]["message"]
        assert token not in answer.text
    new = TWO.token()
    assert ask(new).status_code == 401
    server.answer = (200, key_set(TWO))
    seen: list[int] = []
    assert until(lambda: listed(gateway, new, seen), 60.0, every=0.2) is not None
    assert 502 in seen  # a client's package tries again; after 401 it would not
    assert until(lambda: ask(new).status_code == 200, 60.0, every=0.2) is not None
    assert until(lambda: ask(good).status_code == 401, 60.0, every=0.2) is not None
    # A refusal ends its connection, so another relay may have the next, and has still to read the new keys.
    assert until(lambda: ask(new).status_code == 200, 60.0, every=0.2) is not None
    server.answer = (500, b"")
    assert ask(TWO.token(jti="later")).status_code == 200


def test_a_class_claim_that_is_less_important_than_batches_makes_none(
    site: tuple[Gateway, KeyServer, Ask], tmp_path: Path
) -> None:
    gateway, _, _ = site
    for claimed, status in (("bulk", 403), ("batch", 200), ("interactive", 200)):
        assert batch_made(gateway, claimed) == status
    file = tmp_path / "policy.yaml"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"batches": {"class": "bulk"}}))
    assert until(lambda: batch_made(gateway, "bulk") == 200, 60.0) is not None


def batch_made(gateway: Gateway, claimed: str) -> int:
    """The status of a batch that is asked for with a token of this class."""
    token = ONE.token(**{"class": claimed})
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=token, max_retries=0) as client:
        file = client.files.create(file=("in.jsonl", b"x"), purpose="batch").id
    asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    headers = {"authorization": f"Bearer {token}"}
    made = httpx.post(
        f"{gateway.url}/v1/batches", json=asked, headers=headers, trust_env=False, verify=NOBODY, timeout=60.0
    )
    assert ("more important" in made.text) == (made.status_code == 403), made.text
    return made.status_code


def listed(gateway: Gateway, token: str, seen: list[int]) -> bool:
    """Whether the token may list files now. `seen`: statuses so far."""
    headers = {"authorization": f"Bearer {token}"}
    seen.append(
        httpx.get(f"{gateway.url}/v1/files", headers=headers, trust_env=False, verify=NOBODY, timeout=60.0).status_code
    )
    return seen[-1] == 200
