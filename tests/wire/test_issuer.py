"""Issuer's keys from a real server: read, rotated, out of reach; and the tokens that they have verified."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable

import pytest
from msgspec import structs

from gateway.core.policy.auth import AuthPolicy, auth_faults
from gateway.core.policy.policy import Policy
from gateway.core.request.outcome import AwaitsKeys, Outcome, Refused
from gateway.relay import issuer as of_issuer
from gateway.relay.issuer import Issuer
from gateway.serve.starting import issuer_of
from tests.tokens import AUDIENCE, ISSUER, KeyPair, KeyServer, key_set

ONE, TWO = KeyPair("one"), KeyPair("two")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_issuer, "AGAIN", 0.0)


def holds(issuer: Issuer, token: str) -> str:
    data = token.encode()
    return issuer.holder(data, hashlib.sha256(data).digest()).tenant


def refusal(issuer: Issuer, token: str) -> Refused:
    with pytest.raises(Refused) as caught:
        holds(issuer, token)
    return caught.value


def run(scenario: Callable[[Issuer, KeyServer, list[str]], Awaitable[None]]) -> None:
    """A scenario with an issuer whose first reading has ended."""

    async def main(server: KeyServer) -> None:
        said: list[str] = []
        issuer = Issuer(AuthPolicy(issuer=ISSUER, audience=AUDIENCE, jwks=server.url), b"", said.append)
        await issuer.keys_read()
        try:
            await asyncio.wait_for(scenario(issuer, server, said), 20)
        finally:
            await issuer.aclose()

    with KeyServer(ONE) as server:
        asyncio.run(main(server))


def test_a_new_key_is_read_for_its_first_token_and_a_key_that_is_gone_ends_its_tokens() -> None:
    async def scenario(issuer: Issuer, server: KeyServer, said: list[str]) -> None:
        old, new = ONE.token(), TWO.token()
        assert holds(issuer, old) == holds(issuer, old) == "acme"
        assert server.asked == 1
        server.answer = (200, key_set(TWO))
        assert isinstance(refusal(issuer, new), AwaitsKeys)
        await issuer.keys_read()
        assert holds(issuer, new) == "acme"
        assert refusal(issuer, old).outcome is Outcome.UNAUTHORIZED  # verified before, by a key that is gone
        assert said == []

    run(scenario)


def test_a_key_that_is_replaced_under_its_name_is_read_for_its_first_token() -> None:
    async def scenario(issuer: Issuer, server: KeyServer, said: list[str]) -> None:
        replaced = KeyPair("one")
        server.answer = (200, key_set(replaced))
        assert isinstance(refusal(issuer, replaced.token()), AwaitsKeys)
        await issuer.keys_read()
        assert holds(issuer, replaced.token()) == "acme"

    run(scenario)


def test_a_key_of_an_odd_shape_spoils_no_other() -> None:
    async def scenario(issuer: Issuer, server: KeyServer, said: list[str]) -> None:
        odd = {"keys": [{"kty": "RSA", "alg": ["RS256"]}, {"kty": "EC", "alg": {}}, TWO.jwk]}
        server.answer = (200, json.dumps(odd).encode())
        assert isinstance(refusal(issuer, TWO.token()), AwaitsKeys)
        await issuer.keys_read()
        assert holds(issuer, TWO.token()) == "acme"

    run(scenario)


@pytest.mark.parametrize("path", ["", "/", "/keys/", "/v1/keys?tenant=a&p=B2C_1_sign%2Fin", "/?x"])
def test_the_address_is_asked_for_as_it_is_written(path: str) -> None:
    async def main(server: KeyServer) -> None:
        url = server.url.removesuffix("/keys.json") + path
        policy = AuthPolicy(issuer=ISSUER, audience=AUDIENCE, jwks=url)
        assert not list(auth_faults(policy, ["acme"]))
        issuer = Issuer(policy, b"", print)
        await issuer.keys_read()
        assert server.target == (path or "/")
        assert holds(issuer, ONE.token()) == "acme"
        await issuer.aclose()

    with KeyServer(ONE) as server:
        asyncio.run(main(server))


def test_a_reload_that_changes_a_claim_goes_on_with_the_keys_and_with_no_token_of_before() -> None:
    async def scenario(issuer: Issuer, server: KeyServer, said: list[str]) -> None:
        token = ONE.token(team="globex")
        assert holds(issuer, token) == "acme"
        server.answer = (500, b"")
        policy = Policy(auth=structs.replace(issuer.auth, tenant_claim="team"))
        after = issuer_of(policy, b"", issuer, said.append)
        assert after is not None
        assert holds(after, token) == "globex"
        moved = structs.replace(issuer.auth, jwks=f"{server.url}?other")
        assert isinstance(refusal(Issuer(moved, b"", said.append, before=issuer), token), AwaitsKeys)
        await after.aclose()

    run(scenario)


def test_tokens_of_unknown_keys_are_no_load_on_the_issuer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_issuer, "AGAIN", 60.0)

    async def scenario(issuer: Issuer, server: KeyServer, said: list[str]) -> None:
        for _ in range(50):
            refused = refusal(issuer, TWO.token())
            assert not isinstance(refused, AwaitsKeys)
            assert "not among the issuer's keys" in refused.message
        assert server.asked == 1

    run(scenario)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((302, b""), "status 302"),
        ((500, b"broken"), "status 500"),
        ((200, b"<html>"), "no JWK Set"),
        ((200, b"[" * 300_000), "262144 bytes"),
    ],
)
def test_known_keys_outlive_a_failing_address_up_to_a_bound(
    answer: tuple[int, bytes], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(issuer: Issuer, server: KeyServer, said: list[str]) -> None:
        old = ONE.token()
        assert holds(issuer, old) == "acme"
        server.answer = answer
        for _ in range(2):
            assert isinstance(refusal(issuer, TWO.token()), AwaitsKeys)
            await issuer.keys_read()
        assert holds(issuer, old) == holds(issuer, ONE.token(jti="another")) == "acme"
        assert len(said) == 1  # told once
        assert why in said[0]
        assert "valid for 24 h" in said[0]
        monkeypatch.setattr(of_issuer, "KEPT", 0.0)
        monkeypatch.setattr(of_issuer, "EVERY", 0.0)
        refused = refusal(issuer, old)
        assert (refused.outcome, refused.reason) == (Outcome.UPSTREAM, "issuer_keys")
        monkeypatch.undo()
        server.answer = (200, key_set(ONE))
        await issuer.keys_read()  # the one that has just begun may have met either answer
        issuer._asked_at = 0.0
        refusal(issuer, TWO.token()) if issuer._keys else refusal(issuer, old)
        await issuer.keys_read()
        assert holds(issuer, old) == "acme"
        assert "are read again" in said[-1]

    run(scenario)


def test_a_token_is_verified_once_and_not_beyond_its_end() -> None:
    async def main() -> None:
        now = [1000.0]
        auth = AuthPolicy(issuer=ISSUER, audience=AUDIENCE, jwks="keys.json")
        issuer = Issuer(auth, key_set(ONE), lambda _: None, wall=lambda: now[0])
        token = ONE.token(exp=1100.0)
        assert holds(issuer, token) == "acme"
        issuer._keys = None if issuer._keys is None else type(issuer._keys)(key_set(TWO))
        now[0] = 1099.0
        assert holds(issuer, token) == "acme"  # no key was asked
        now[0] = 1100.0
        assert "not among the issuer's keys" in refusal(issuer, token).message

    asyncio.run(main())


def test_verified_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_issuer, "MOST_TOKENS", 3)

    async def main() -> None:
        auth = AuthPolicy(issuer=ISSUER, audience=AUDIENCE, jwks="keys.json")
        issuer = Issuer(auth, key_set(ONE), lambda _: None)
        for number in range(10):
            assert holds(issuer, ONE.token(jti=str(number))) == "acme"
        assert len(issuer._verified) == 3

    asyncio.run(main())


def test_a_file_without_a_key_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="no keys"):
            Issuer(AuthPolicy(issuer=ISSUER, audience=AUDIENCE, jwks="k"), b'{"keys": []}', lambda _: None)

    asyncio.run(main())
