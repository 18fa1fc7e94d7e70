"""Authentication of tenants: good, bad and missing keys, and trusted or untrusted headers."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Mapping

import msgspec
import pytest

from gateway.core.policy.auth import AuthPolicy
from gateway.core.policy.file import decode
from gateway.core.policy.policy import Policy, Routing
from gateway.core.policy.signed_token import Verified
from gateway.core.policy.traffic import Refusal, Tenant
from gateway.core.request import tenants
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.tenants import Account, Tenants, keys_from, with_keys
from gateway.shared.files.checked import InvalidFile
from tests.config_files import problems_of


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


GOOD, OTHER = "weir-good", "weir-other"
KEYS = {hash_of(GOOD): "acme", hash_of(OTHER): "zoo"}
POLICY = Policy(tenants={"acme": Tenant(), "zoo": Tenant(), "anonymous": Tenant()}, keys_file="keys.txt")
CLOSED = Policy(tenants={"acme": Tenant(), "zoo": Tenant()}, keys_file="keys.txt")


def keyed(policy: Policy, keys: Mapping[str, str] = KEYS) -> Tenants:
    return Tenants(with_keys(policy, keys, "keys.txt"))


def refused(who: Tenants, headers: Mapping[bytes, bytes], peer: str = "10.0.0.1") -> Refused:
    with pytest.raises(Refused) as caught:
        who.identify(headers, peer)
    assert caught.value.outcome is Outcome.UNAUTHORIZED
    return caught.value


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({b"authorization": b"Bearer weir-good"}, "acme"),
        ({b"authorization": b"bearer weir-good"}, "acme"),
        ({b"authorization": b"BEARER   weir-good "}, "acme"),
        ({b"x-api-key": b"weir-other"}, "zoo"),
        ({b"authorization": b"Bearer weir-good", b"x-api-key": b"weir-other"}, "acme"),
        ({}, "anonymous"),
        ({b"cookie": b"weir-good"}, "anonymous"),
    ],
)
def test_a_key_says_who(headers: dict[bytes, bytes], name: str) -> None:
    assert keyed(POLICY).identify(headers, "10.0.0.1").name == name


WRONG = [
    {b"authorization": b"Bearer weir-goo"},
    {b"authorization": b"Bearer weir-goodd"},
    {b"authorization": b"Bearer WEIR-GOOD"},
    {b"authorization": b"Bearer"},
    {b"authorization": b"Bearer "},
    {b"authorization": b""},
    {b"authorization": b"weir-good"},
    {b"authorization": b"Basic weir-good"},
    {b"authorization": b"Bearer\tweir-good"},
    {b"authorization": b"Bearer " + hash_of(GOOD).encode()},
    {b"authorization": b"Bearer \xff\x00\xfe"},
    {b"authorization": b"Bearer " + b"k" * 16_000},
    {b"authorization": b"Bearer wrong", b"x-api-key": b"weir-good"},
    {b"x-api-key": b""},
    {b"x-api-key": b"Bearer weir-good"},
]


@pytest.mark.parametrize("headers", WRONG)
@pytest.mark.parametrize("policy", [POLICY, CLOSED])
def test_a_wrong_key_is_refused_also_where_none_is_needed(policy: Policy, headers: dict[bytes, bytes]) -> None:
    refused(keyed(policy), headers)


def test_wrong_and_missing_keys_are_answered_alike() -> None:
    who = keyed(CLOSED)
    told = {(no.body(), no.status, no.headers, no.code) for no in (refused(who, headers) for headers in [*WRONG, {}])}
    assert len(told) == 1
    assert b'"invalid_api_key"' in told.pop()[0]


def test_a_revoked_key_is_gone_with_the_reload() -> None:
    headers = {b"authorization": b"Bearer weir-good"}
    assert keyed(POLICY).identify(headers, "unix").name == "acme"
    refused(keyed(POLICY, {hash_of(OTHER): "zoo"}), headers)
    refused(keyed(POLICY, {}), headers)


def test_a_gateway_is_keyed_where_anybody_has_or_may_be_given_a_key() -> None:
    assert not Tenants(Policy()).keyed
    assert Tenants(Policy(keys_file="keys.txt")).keyed
    assert keyed(Policy(tenants={"acme": Tenant()}), {"0" * 64: "acme"}).keyed


def test_where_there_are_no_keys_at_all_none_is_wrong() -> None:
    who = Tenants(Policy())
    assert who.identify({b"authorization": b"Bearer none"}, "unix").name == "anonymous"
    refused(Tenants(Policy(keys_file="keys.txt")), {b"authorization": b"Bearer none"})
    refused(Tenants(Policy(tenants={"acme": Tenant()})), {b"authorization": b"Bearer none"})


# -- trusted proxies --------------------------------------------------------------------------------------------------

PROXIES = ("10.1.0.0/16", "192.168.0.7", "fd00::/8", "unix")


def test_nor_is_one_that_a_proxy_passes_on_where_it_names_nobody() -> None:
    who = Tenants(Policy(trusted_proxies=PROXIES))
    assert who.identify({b"authorization": b"Bearer none"}, "10.1.2.3").name == "anonymous"
    assert who.identify({b"authorization": b"Bearer none", b"x-tenant": b"anonymous"}, "8.8.8.8").name == "anonymous"
    refused(who, {b"authorization": b"Bearer none", b"x-tenant": b"acme"}, peer="10.1.2.3")


BEHIND = Policy(tenants=POLICY.tenants, keys_file="keys.txt", trusted_proxies=PROXIES)


@pytest.mark.parametrize(
    ("peer", "trusted"),
    [
        ("10.1.2.3", True), ("192.168.0.7", True), ("fd00::7", True), ("::ffff:10.1.2.3", True), ("unix", True),
        ("10.2.0.1", False), ("192.168.0.8", False), ("fe80::1%eth0", False), ("::ffff:10.2.0.1", False), ("", False),
        ("localhost", False),
    ],
)  # fmt: skip
def test_only_a_trusted_peer_may_name_the_tenant(peer: str, trusted: bool) -> None:
    who = keyed(BEHIND)
    for _ in range(2):
        assert who.identify({b"x-tenant": b"zoo"}, peer).name == ("zoo" if trusted else "anonymous")
        assert who.identify({b"x-who": b"zoo"}, peer).name == "anonymous", "another header says nothing"
        key = {b"authorization": b"Bearer weir-good"}
        assert who.identify(key | {b"x-tenant": b"zoo"}, peer).name == ("zoo" if trusted else "acme")
        assert who.identify(key, peer).name == "acme", "a proxy may leave it to the key"


@pytest.mark.parametrize("name", [b"", b"gone", b"ZOO", b"zoo ", b"zoo,acme", b"\xff"])
def test_a_trusted_peer_that_names_nobody_is_refused(name: bytes) -> None:
    refused(keyed(BEHIND), {b"x-tenant": name, b"authorization": b"Bearer weir-good"}, "unix")


def test_a_forged_header_is_nothing_where_no_proxy_is_trusted() -> None:
    who = keyed(CLOSED)
    refused(who, {b"x-tenant": b"zoo"}, "127.0.0.1")
    assert who.identify({b"x-tenant": b"zoo", b"x-api-key": b"weir-good"}, "127.0.0.1").name == "acme"


def test_unix_is_trusted_only_where_it_is_named() -> None:
    policy = Policy(tenants=CLOSED.tenants, trusted_proxies=("0.0.0.0/0",))
    refused(Tenants(policy), {b"x-tenant": b"zoo"}, "unix")


def test_the_memory_of_peers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "PEERS_REMEMBERED", 3)
    who = keyed(BEHIND)
    for last in range(10):
        assert who.identify({b"x-tenant": b"zoo"}, f"10.1.0.{last}").name == "zoo"
        assert who.identify({b"x-tenant": b"zoo"}, f"10.2.0.{last}").name == "anonymous"
    assert len(who._peers) == 3


def test_a_network_that_is_none_is_not_passed_over() -> None:
    with pytest.raises(ValueError, match=r"999\.1\.1\.1"):
        Tenants(Policy(trusted_proxies=("999.1.1.1",)))


# -- accounts ---------------------------------------------------------------------------------------------------------


def test_an_account_has_what_a_call_needs() -> None:
    policy = decode(b"""
tenants:
  plain: {}
  acme: {class: batch, best_class: long_context, weight: 2, models: [a, b], refusal: {body: {tips: no}}}
""")
    plain, acme = (Tenants(policy).accounts[name] for name in ("plain", "acme"))
    assert (plain.name, plain.default_class, plain.best, plain.weight) == ("plain", None, 0, 1.0)
    assert (plain.models, plain.refusal) == (frozenset(), None)
    assert (acme.default_class, acme.best, acme.weight, acme.models) == ("batch", 2, 2.0, {"a", "b"})
    assert acme.refusal == Refusal(body={"tips": "no"})
    assert not hasattr(acme, "__dict__")
    assert isinstance(acme, Account)


# -- the keys file ----------------------------------------------------------------------------------------------------

A, B, C = (character * 64 for character in "abc")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("\n# nothing\n  \n\t# indented\r\n", {}),
        (f"{A} acme", {A: "acme"}),
        (f"{A} acme\n{B} acme # second\r\n  {C}\tzoo   made by hand, # or not\n", {A: "acme", B: "acme", C: "zoo"}),
        (f"#{A} gone\n\ufeff{B} a.b-c_9\n", {B: "a.b-c_9"}),
        (f"\ufeff{A} acme # ünïcödé\n", {A: "acme"}),
    ],
)
def test_a_keys_file(text: str, expected: dict[str, str]) -> None:
    assert keys_from(text.encode(), "keys.txt") == expected


def test_a_comment_may_be_in_any_encoding() -> None:
    assert keys_from(f"{A} acme ".encode() + b"\xff\xfe\n", "k") == {A: "acme"}


def problems(data: bytes) -> list[str]:
    return problems_of(keys_from, data, "keys.txt")


def test_every_problem_of_a_keys_file_is_told_by_its_line() -> None:
    expected = "expected the SHA-256 of a key (64 hexadecimal digits in lower case), then a tenant's name"
    assert problems(
        f"{A} acme\n\nweir-secret acme\n{A.upper()} acme\n{B}\n{C} # whose?\n{A} zoo\n{A}0 zoo\n".encode()
    ) == [
        f"keys.txt:3: found 11 characters instead of the hash, {expected}",
        f"keys.txt:4: found 64 characters instead of the hash, {expected}",
        f"keys.txt:5: found no tenant after the hash, {expected}",
        "keys.txt:6: found '#', expected a tenant's name as in the policy",
        "keys.txt:7: found the key of line 1 again, expected each key once",
        f"keys.txt:8: found 65 characters instead of the hash, {expected}",
    ]


def test_the_hash_of_nothing_is_no_key() -> None:
    nothing = hashlib.sha256().hexdigest()
    assert problems(f"{A} acme\n{nothing} acme\n".encode()) == [
        "keys.txt:2: found the SHA-256 of an empty key: callers without a key would be this tenant, "
        "expected the SHA-256 of a key"
    ]


def test_a_keys_file_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "MAX_KEYS", 2)
    assert problems(f"{A} acme\n{B} acme\n{C} acme\n".encode()) == ["keys.txt:1: found 3 keys, expected at most 2"]
    monkeypatch.setattr(tenants, "MAX_KEYS_BYTES", 100)
    assert problems(b"#" * 101) == ["keys.txt:1: found 101 bytes, expected at most 100 bytes"]


def test_a_policy_with_the_keys_of_its_file() -> None:
    policy = Policy(tenants={"acme": Tenant(keys=(A,)), "zoo": Tenant()}, keys_file="keys.txt")
    whole = with_keys(policy, {A: "acme", B: "acme", C: "zoo"}, "keys.txt")
    assert {name: tenant.keys for name, tenant in whole.tenants.items()} == {"acme": (A, B), "zoo": (C,)}
    assert with_keys(policy, {}, "keys.txt") == policy
    with pytest.raises(InvalidFile) as caught:
        with_keys(policy, {A: "zoo", B: "acmee", C: "nobody"}, "keys.txt")
    assert str(caught.value).splitlines() == [
        "keys.txt: aaaaaaaaaaaa...: found the tenant zoo, expected acme, whose key it is in the policy",
        "keys.txt: bbbbbbbbbbbb...: found the tenant acmee, expected a tenant of the policy (did you mean acme?)",
        "keys.txt: cccccccccccc...: found the tenant nobody, expected a tenant of the policy",
    ]


def test_whether_a_key_is_a_tenants() -> None:
    who = keyed(POLICY)
    assert who.has_key(GOOD)
    assert not who.has_key("weir-goo")
    assert not who.has_key("")
    assert not who.has_key("\udcff"), "no key is a reason to fail"


def test_a_key_is_asked_for_where_nobody_is_anonymous() -> None:
    refused(keyed(CLOSED), {})


# -- cache salts ------------------------------------------------------------------------------------------------------


def salts(policy: Policy, secret: bytes = b"secret") -> dict[str, bytes]:
    return {name: account.cache_salt for name, account in Tenants(policy, cache_secret=secret).accounts.items()}


def test_each_tenant_has_a_salt_of_its_own_that_lasts_as_long_as_the_secret() -> None:
    made = salts(POLICY)
    assert len(set(made.values())) == 3
    assert salts(CLOSED) == {name: salt for name, salt in made.items() if name != "anonymous"}
    assert not set(made.values()) & set(salts(POLICY, b"another").values())
    for salt in made.values():
        (name, value), *more = msgspec.json.decode(b"{" + salt[1:] + b"}").items()
        assert (name, len(value), more) == ("cache_salt", 43, [])
        assert value.isascii()


def test_who_is_alone_or_shares_has_none() -> None:
    assert set(salts(Policy()).values()) == {b""}
    assert set(salts(Policy(tenants=POLICY.tenants, routing=Routing(cache_isolation="none"))).values()) == {b""}
    assert set(salts(POLICY, b"").values()) == {b""}


# -- tokens of an issuer ----------------------------------------------------------------------------------------------


class Tokens:
    """Holders of tokens by the token itself, as an issuer would verify them."""

    jwks = b""

    def holder(self, token: bytes, digest: bytes) -> Verified:
        assert digest == hashlib.sha256(token).digest()
        known = {
            b"a.b.c": ("acme", ""),
            b"a.b.batch": ("acme", "batch"),
            b"a.b.no": ("acme", "no"),
            b"x.y.z": ("x", ""),
        }
        if token not in known:
            raise Refused(Outcome.UNAUTHORIZED, "The token was refused: its signature.")
        return Verified(*known[token], 2.0**40)

    def keys_read(self) -> Awaitable[None]:
        raise AssertionError


AUTH = Policy(tenants={"acme": Tenant()}, auth=AuthPolicy(issuer="i", audience="a", jwks="k"))


def test_a_token_says_who_and_which_class() -> None:
    who = Tenants(with_keys(AUTH, {hash_of("weir.key.dots"): "acme"}, "k"), tokens=Tokens())
    account = who.identify({b"authorization": b"Bearer a.b.c"}, "10.0.0.1")
    assert account is who.accounts["acme"]
    assert not account.claimed
    batch = who.identify({b"x-api-key": b"a.b.batch"}, "10.0.0.1")
    assert (batch.name, batch.claimed) == ("acme", "batch")
    assert who.identify({b"authorization": b"Bearer a.b.batch"}, "10.0.0.1") is batch
    assert who.identify({b"authorization": b"Bearer weir.key.dots"}, "10.0.0.1").name == "acme"  # a key comes first


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (b"x.y.z", "it names no tenant of this gateway"),
        (b"a.b.no", "it names no class of this gateway"),
        (b"a.b.x", "its signature"),
        (b"weir-wrong", "No valid API key."),
        (b"a.b", "No valid API key."),
    ],
)
def test_a_refused_token_is_told_why_and_a_key_is_not(token: bytes, message: str) -> None:
    who = Tenants(AUTH, tokens=Tokens())
    assert message in refused(who, {b"authorization": b"Bearer " + token}).message
    assert who.keyed
    assert not who.open


def test_without_an_issuer_a_token_is_a_wrong_key() -> None:
    who = keyed(CLOSED)
    assert "No valid API key." in refused(who, {b"authorization": b"Bearer a.b.c"}).message
