"""Tokens of an issuer: which are accepted, and which check refuses the others."""

from __future__ import annotations

import base64
import hmac
import json
import time
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.policy.auth import AuthPolicy
from gateway.core.policy.signed_token import LEEWAY, MOST_TRIED, KeySet, TokenFault, UnknownKey, Verified
from tests.examples import examples
from tests.tokens import AUDIENCE, ISSUER, KeyPair, key_set

AUTH = AuthPolicy(issuer=ISSUER, audience=AUDIENCE, jwks="keys.json", class_claim="class")
ONE, TWO, RSA, ED = KeyPair("one"), KeyPair("two"), KeyPair("rsa", "RS256"), KeyPair("ed", "EdDSA")
KEYS = KeySet(key_set(ONE, TWO, RSA, ED))
NOW = time.time()


def fault(token: str | bytes, keys: KeySet = KEYS) -> str:
    with pytest.raises(TokenFault) as caught:
        keys.verified(token if isinstance(token, bytes) else token.encode(), AUTH, NOW)
    assert str(token) not in str(caught.value)
    return str(caught.value)


def part(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


@pytest.mark.parametrize("key", [ONE, TWO, RSA, ED], ids=lambda key: key.kid)
def test_each_kind_of_key_verifies_its_tokens(key: KeyPair) -> None:
    token = key.token(exp=NOW + 60, **{"class": "batch"})
    assert KEYS.verified(token.encode(), AUTH, NOW) == Verified("acme", "batch", NOW + 60)


def test_what_a_token_may_leave_out_or_have_more_of() -> None:
    token = ONE.token(aud=["other", AUDIENCE], nbf=NOW + LEEWAY - 1, iat=NOW + LEEWAY - 1, exp=NOW + 1)
    assert KEYS.verified(token.encode(), AUTH, NOW).class_name == ""
    unnamed = _unnamed(ONE)
    for keys in (KeySet(key_set(ONE)), KEYS, KeySet(key_set(TWO, ONE))):
        assert keys.verified(unnamed, AUTH, NOW).tenant == "acme"
    no_class = AuthPolicy(issuer=ISSUER, audience=AUDIENCE, jwks="keys.json")
    assert KEYS.verified(ONE.token(**{"class": "batch"}).encode(), no_class, NOW).class_name == ""


def _unnamed(key: KeyPair) -> bytes:
    """A token that names no key."""
    claims = {"iss": ISSUER, "aud": AUDIENCE, "tenant": "acme", "exp": NOW + 1}
    return jwt.encode(claims, key.private, key.algorithm).encode()


@pytest.mark.parametrize(
    ("claims", "check"),
    [
        ({"iss": "https://evil.example.com/"}, "(`iss`)"),
        ({"iss": None}, "(`iss`)"),
        ({"iss": [ISSUER]}, "(`iss`)"),
        ({"aud": "weir2"}, "(`aud`)"),
        ({"aud": None}, "(`aud`)"),
        ({"aud": {"weir": 1}}, "(`aud`)"),
        ({"exp": None}, "no end (`exp`)"),
        ({"exp": NOW}, "expired (`exp`)"),
        ({"exp": NOW - 3600}, "expired (`exp`)"),
        ({"exp": "9999999999"}, "`exp` is no time"),
        ({"exp": True}, "`exp` is no time"),
        ({"exp": float("inf")}, "`exp` is no time"),
        ({"exp": float("nan")}, "`exp` is no time"),
        ({"exp": 10**400}, "`exp` is no time"),
        ({"nbf": NOW + 60}, "(`nbf`)"),
        ({"nbf": "soon"}, "`nbf` is no time"),
        ({"iat": NOW + 60}, "(`iat`)"),
        ({"tenant": None}, "names its tenant"),
        ({"tenant": ["acme"]}, "names its tenant"),
        ({"class": 1}, "names its tenant or class"),
    ],
)
def test_the_fault_names_the_claim(claims: dict[str, Any], check: str) -> None:
    assert check in fault(_signed(claims))


def _signed(claims: dict[str, Any]) -> str:
    """A token with claims that PyJWT would not write."""
    every = {"iss": ISSUER, "aud": AUDIENCE, "tenant": "acme", "exp": NOW + 60, **claims}
    payload = json.dumps({name: value for name, value in every.items() if value is not None}).encode()
    return jwt.PyJWS().encode(payload, ONE.private, "ES256", headers={"kid": "one"})


def test_no_token_chooses_how_it_is_verified() -> None:
    good = ONE.token()
    body = good.split(".")[1]
    assert "none of public keys" in fault(f"{part({'alg': 'none', 'kid': 'one'})}.{body}.")
    assert "none of public keys" in fault(f"{part({'alg': 'None', 'kid': 'one'})}.{body}.")
    public = RSA.private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    forged = f"{part({'alg': 'HS256', 'kid': 'rsa'})}.{body}"  # by the public key, as if it were a secret
    mac = base64.urlsafe_b64encode(hmac.digest(public, forged.encode(), "sha256")).rstrip(b"=").decode()
    assert "none of public keys" in fault(f"{forged}.{mac}")
    other = jwt.encode({"iss": ISSUER}, RSA.private, "RS512", headers={"kid": "rsa"})
    assert "not that of the issuer's key" in fault(other)
    assert "(`crit`)" in fault(
        f"{part({'alg': 'ES256', 'kid': 'one', 'crit': ['b64'], 'b64': True})}.{body}.{good.split('.')[2]}"
    )


def test_a_key_that_is_not_the_issuers_verifies_nothing() -> None:
    stranger, forger = KeyPair("three"), KeyPair("one")
    assert "not among the issuer's keys" in fault(stranger.token())
    assert "signature" in fault(forger.token())
    head, _, signature = ONE.token().split(".")
    claims = part({"iss": ISSUER, "aud": AUDIENCE, "tenant": "globex", "exp": NOW + 60})
    assert "signature" in fault(f"{head}.{claims}.{signature}")


@pytest.mark.parametrize(
    "token",
    ["a.b.c", "..", "x" * 9000 + "..", f"{part([1])}..", f"{part({'alg': 'ES256', 'kid': 5})}.e30.", "\xff.\xff.\xff"],
)
def test_what_is_no_token_is_refused(token: str) -> None:
    assert fault(token.encode("latin-1")).startswith(("it is no signed JWT", "it has more than 8192 bytes"))
    for odd in (["ES256"], {"ES256": 1}, 256, None):
        assert "none of public keys" in fault(f"{part({'alg': odd, 'kid': 'one'})}.e30.AAAA")
    nested = base64.urlsafe_b64encode(b"[" * 4000).decode()
    assert fault(f"{nested}.e30.x") == "it is no signed JWT"
    deep = jwt.PyJWS().encode(b"[" * 4000, ONE.private, "ES256", headers={"kid": "one"})
    assert fault(deep) == "it is no signed JWT"


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=60), st.integers(0, 400))
def test_a_changed_token_is_never_accepted(piece: bytes, at: int) -> None:
    good = TOKEN.encode()
    at %= len(good)
    changed = good[:at] + piece + good[at + len(piece) :]
    if changed != good and not _same(changed, good):
        fault(changed)


TOKEN = ED.token()


def _same(one: bytes, two: bytes) -> bool:
    """Whether two texts are of the same bytes in Base64, of which the last character has bits to spare."""
    try:
        return [base64.urlsafe_b64decode(part + b"==") for part in one.split(b".")] == [
            base64.urlsafe_b64decode(part + b"==") for part in two.split(b".")
        ]
    except ValueError:
        return False


# -- sets of keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no JWK Set"),
        (b"[]", "no JWK Set"),
        (b'{"keys": {}}', "no list of at most 100 keys"),
        (b'{"keys": [' + b"{}," * 100 + b"{}]}", "no list of at most 100 keys"),
        (b'{"keys": []}', "(no keys)"),
        (b'{"keys": [1]}', "(no object)"),
        (b'{"keys": [{"kty": "oct", "k": "AAAA"}]}', "(a private or symmetric key)"),
        (b'{"keys": [{"kty": "RSA", "use": "enc"}]}', "(a key for encryption)"),
        (b'{"keys": [{"kty": "RSA", "alg": "RSA-OAEP"}]}', "(a key of another algorithm)"),
        (b'{"keys": [{"kty": "RSA", "kid": 5}]}', "(a key of another algorithm)"),
        (b'{"keys": [{"kty": "RSA", "alg": ["RS256"]}]}', "(a key of another algorithm)"),
        (b'{"keys": [{"kty": ["RSA"], "crv": {"P-256": 1}}]}', "(a key of another algorithm)"),
        (b'{"keys": [{"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}]}', "(a malformed key)"),
        (b" " * 300_000, "more than 262144 bytes"),
    ],
)
def test_a_set_without_a_usable_key_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        KeySet(data)
    assert why in str(caught.value)


def test_a_private_or_short_key_is_left_out() -> None:
    private = {**json.loads(jwt.get_algorithm_by_name("ES256").to_jwk(ONE.private)), "kid": "one"}  # type: ignore[attr-defined] # it has it
    private.pop("key_ops", None)
    assert "d" in private
    short = {"kty": "RSA", "e": "AQAB", "n": base64.urlsafe_b64encode(b"\xc5" * 128).rstrip(b"=").decode()}
    keys = KeySet(json.dumps({"keys": [private, short, TWO.jwk]}).encode())
    with pytest.raises(UnknownKey):
        keys.verified(ONE.token().encode(), AUTH, NOW)
    assert keys.verified(TWO.token().encode(), AUTH, NOW).tenant == "acme"
    with pytest.raises(ValueError, match="an RSA key of less than 2048 bits"):
        KeySet(json.dumps({"keys": [short]}).encode())


def test_keys_that_share_a_name_or_have_none_verify_their_own_tokens() -> None:
    pairs = [KeyPair("one"), KeyPair("one"), KeyPair("one", "RS256")]
    nameless = json.dumps({"keys": [{**key.jwk, "kid": None} for key in pairs]}).replace(', "kid": null', "")
    for keys in (KeySet(key_set(*pairs)), KeySet(key_set(*reversed(pairs))), KeySet(nameless.encode())):
        for key in pairs:
            assert keys.verified(_unnamed(key), AUTH, NOW).tenant == "acme"
    for key in pairs:
        assert KeySet(key_set(*pairs)).verified(key.token().encode(), AUTH, NOW).tenant == "acme"
    with pytest.raises(UnknownKey):  # a key of that name may have been replaced
        KeySet(key_set(*pairs)).verified(KeyPair("one").token().encode(), AUTH, NOW)


def test_no_token_makes_the_gateway_try_many_keys() -> None:
    many = [KeyPair(str(number)) for number in range(MOST_TRIED + 1)]
    assert KeySet(key_set(*many[1:])).verified(_unnamed(many[-1]), AUTH, NOW).tenant == "acme"
    assert "which of the issuer's keys" in fault(_unnamed(many[0]), KeySet(key_set(*many)))
    assert KeySet(key_set(*many)).verified(many[-1].token().encode(), AUTH, NOW).tenant == "acme"
