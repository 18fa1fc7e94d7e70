"""Addresses of listeners: the address by which this machine reaches a port on every interface."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import pytest

from gateway.shared.addresses import reachable


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://0.0.0.0:8001", "http://127.0.0.1:8001"),
        ("http://[::]:8001/v1", "http://[::1]:8001/v1"),
        ("http://127.0.0.1:8001", "http://127.0.0.1:8001"),
        ("unix:/run/weir.sock", "unix:/run/weir.sock"),
    ],
)
def test_a_listener_on_every_interface_is_reached_over_loopback(url: str, expected: str) -> None:
    assert reachable(url) == expected


@pytest.mark.parametrize(("host", "family"), [("0.0.0.0", socket.AF_INET), ("::", socket.AF_INET6)])  # noqa: S104
def test_the_address_is_one_that_answers(host: str, family: socket.AddressFamily) -> None:
    with socket.create_server((host, 0), family=family) as listening:
        named = f"[{host}]" if ":" in host else host
        url = urlsplit(reachable(f"http://{named}:{listening.getsockname()[1]}"))
        with socket.create_connection((url.hostname, url.port), 60):
            pass
