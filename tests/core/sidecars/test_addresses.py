"""Allow list for addresses that a sidecar names: no loopback, socket or network that it must not reach."""

from __future__ import annotations

import pytest

from gateway.core.sidecars.addresses import is_loopback, is_relayed, networks_of, refusal

PRIVATE = ("10.0.0.0/8", "fd00::/8")
LOOPBACK = ("127.0.0.0/8", "::1")


@pytest.mark.parametrize(
    ("url", "allow", "local", "why"),
    [
        ("http://10.1.2.3:8000", PRIVATE, False, ""),
        ("http://10.1.2.3:8000/", PRIVATE, False, ""),
        ("https://10.1.2.3", PRIVATE, False, ""),
        ("http://[fd00::1]:8000", PRIVATE, False, ""),
        ("http://[::ffff:10.1.2.3]:8000", PRIVATE, False, ""),
        ("http://127.0.0.1:8000", LOOPBACK, True, ""),
        ("http://localhost:8000", LOOPBACK, True, ""),
        ("http://[::1]:8000", LOOPBACK, True, ""),
        ("unix:///run/weir/a.sock", LOOPBACK, True, ""),
        ("https://10.1.2.3:8003/engines/llama-3.1_8b", PRIVATE, False, ""),
        ("http://11.1.2.3:8003/engines/a", PRIVATE, False, "not in a network of fleet.sidecars.allow"),
        ("http://127.0.0.1:8003/engines/a", LOOPBACK, False, "a loopback address of another machine"),
        ("http://11.1.2.3:8000", PRIVATE, True, "not in a network of fleet.sidecars.allow"),
        ("http://127.0.0.1:8000", PRIVATE, True, "not in a network of fleet.sidecars.allow"),
        ("http://10.1.2.3:8000", (), True, "not in a network of fleet.sidecars.allow"),
        ("http://169.254.169.254", PRIVATE, True, "not in a network of fleet.sidecars.allow"),
        ("http://[::ffff:127.0.0.1]:8000", PRIVATE, False, "not in a network of fleet.sidecars.allow"),
        ("http://[::ffff:127.0.0.1]:8000", LOOPBACK, False, "a loopback address of another machine"),
        ("http://localhost:8000", LOOPBACK, False, "a loopback address of another machine"),
        ("unix:///run/weir/a.sock", PRIVATE, False, "a unix socket of another machine"),
        ("http://10.1.2.3:0", PRIVATE, True, "there is no such port"),
        ("http://10.1.2.3:65536", PRIVATE, True, "there is no such port"),
        ("http://10.1.2.256:80", PRIVATE, True, "not an IP address"),
        ("http://010.1.2.3:80", PRIVATE, True, "not an IP address"),
        ("http://2130706433", LOOPBACK, True, "not an IP address"),
        ("http://[10.1.2.3.4]:80", PRIVATE, True, "not an IP address"),
    ],
)
def test_addresses(url: str, allow: tuple[str, ...], local: bool, why: str) -> None:
    assert refusal(url, networks_of(allow), local=local) == why


@pytest.mark.parametrize(
    "url",
    [
        "http://engine.example:8000", "http://10.1.2.3@evil:80", "http://a:b@10.1.2.3", "http://10.1.2.3:80/v1",
        "http://10.1.2.3?x", "http://10.1.2.3#x", "ftp://10.1.2.3", "HTTP://10.1.2.3", "10.1.2.3:80", "",
        "http://10.1.2.3\r\nx: y", "http://10.1.2.3:80\n", "http://[fe80::1%eth0]:80", "unix://relative", "unix:///",
        "unix:///a b", "unix:///a?b", "unix:///" + "a" * 107, "http://0x7f000001",
        "http://localhost.evil:80", "http://10.1.2.3:80/engines/", "http://10.1.2.3:80/engines/a/b",
        "http://10.1.2.3:80/engines/..", "http://10.1.2.3:80/engines/A", "http://evil@10.1.2.3:80/engines/a",
        "http://evil/engines/a", "http://10.1.2.3:80/engines/a?x",
    ],
)  # fmt: skip
def test_what_is_not_plainly_an_address_is_none(url: str) -> None:
    assert refusal(url, networks_of(("0.0.0.0/0", "::/0")), local=True).startswith(
        "not http(s)://ADDRESS:PORT or unix:"
    )


@pytest.mark.parametrize(
    ("url", "local", "why"),
    [
        ("https://10.1.2.3:8003/engines/a", False, ""),
        ("http://10.1.2.3:8003/engines/a", False, "not https://, as fleet.sidecars.tls asks for"),
        ("http://10.1.2.3:8000", True, "not https://, as fleet.sidecars.tls asks for"),
        ("http://127.0.0.1:8002", True, ""),
        ("unix:///run/weir/a.sock", True, ""),
    ],
)
def test_where_tls_is_asked_for_no_other_machine_is_used_without(url: str, local: bool, why: str) -> None:
    assert refusal(url, networks_of((*PRIVATE, *LOOPBACK)), local=local, secure=True) == why


def test_the_order_token_is_for_relays_alone() -> None:
    assert is_relayed("http://10.1.2.3:8003/engines/a")
    assert is_relayed("https://[fd00::1]:8003/engines/b.2")
    for url in ("http://10.1.2.3:8000", "unix:///engines/a", "http://10.1.2.3:8003/engines/", "http://h/x/engines/a"):
        assert not is_relayed(url)


def test_a_control_address_is_no_socket_and_has_no_path() -> None:
    relayed = "http://10.1.2.3:8003/engines/a"
    assert refusal(relayed, networks_of(PRIVATE), local=True, sockets=False).startswith("not http(s)://")
    assert refusal("unix:///run/a", networks_of(LOOPBACK), local=True, sockets=False).startswith("not http(s)://")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.1", False)],
)
def test_who_is_on_this_machine(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
