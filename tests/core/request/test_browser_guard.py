"""DNS rebinding and cross-origin requests against a gateway without keys: refused by Host and by Origin."""

from __future__ import annotations

import pytest

from gateway.core.policy.policy import Policy, ServerPolicy
from gateway.core.policy.snapshot import Snapshot
from gateway.core.policy.traffic import Tenant
from gateway.core.request.browser_guard import BrowserGuard
from gateway.core.request.outcome import Outcome, Refused
from gateway.shared.printable import printable

PAGE = "https://chat.example.com"


def verdict(guard: BrowserGuard, host: str | None, peer: str = "127.0.0.1", origin: str | None = None) -> str | None:
    fields = {b"host": host.encode()} if host is not None else {}
    if origin is not None:
        fields[b"origin"] = origin.encode()
    try:
        guard.check(fields, peer)
    except Refused as refused:
        return refused.code if refused.outcome is Outcome.FORBIDDEN else refused.outcome.value
    return None


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8080",
        "127.0.0.1:8080",
        "10.1.2.3",
        "[::1]:8080",
        "[::1]",
        "x.localhost",
        "weir.local:80",
        None,
    ],
)
@pytest.mark.parametrize("peer", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "10.0.0.9", "unix"])
def test_hosts_that_are_ours(host: str | None, peer: str) -> None:
    guard = BrowserGuard(["weir.local"], [])
    for _ in range(2):
        assert verdict(guard, host, peer) is None


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "evil.example:8080", "[evil", "weir.localx"]
)
def test_hosts_that_a_page_could_have_brought(host: str) -> None:
    named, unnamed = BrowserGuard(["weir.local"], []), BrowserGuard([], [])
    for peer in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        assert verdict(named, host, peer) == verdict(unnamed, host, peer) == "misdirected_request"
    assert verdict(named, host, "10.0.0.9") == "misdirected_request"
    assert verdict(unnamed, host, "10.0.0.9") is None
    assert verdict(named, host, "unix") is None


@pytest.mark.parametrize(
    ("origin", "code"),
    [
        (PAGE, None),
        ("http://localhost:8080", None),
        ("https://evil.example", "cross_origin"),
        ("null", "cross_origin"),
        ("http://localhost:9090", "cross_origin"),
        ("", "cross_origin"),
    ],
)
def test_origins(origin: str, code: str | None) -> None:
    assert verdict(BrowserGuard([], [PAGE]), "localhost:8080", origin=origin) == code
    assert verdict(BrowserGuard([], ["*"]), "localhost:8080", origin=origin) is None


def test_one_good_host_lets_no_other_in() -> None:
    guard = BrowserGuard([], [])
    assert verdict(guard, "localhost") is None
    assert verdict(guard, "evil.example") == "misdirected_request"
    assert verdict(guard, "localhost") is None


def test_only_a_gateway_that_asks_for_nothing_is_guarded() -> None:
    guarded = Policy(server=ServerPolicy(hosts=("weir.local",)), cors=(PAGE,))
    pages = Snapshot(guarded).browser_guard
    assert pages is not None
    assert verdict(pages, "weir.local", origin=PAGE) is None
    assert Snapshot(Policy(tenants={"acme": Tenant(keys=("0" * 64,))})).browser_guard is None
    assert Snapshot(Policy(trusted_proxies=("127.0.0.1",))).browser_guard is None


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    assert printable("a\x1b[2J\r\nb\x9b\u202e\té") == "a?[2J?\nb???é"
