"""Addresses of listeners: HOST:PORT, loopback, and the URL by which this machine reaches a listener."""

from __future__ import annotations

import ipaddress

# Hosts that listen on every interface, and the loopback address that reaches them. A listener on [::] is reached over
# IPv6 alone: Python's and asyncio's servers set IPV6_V6ONLY.
EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 # they are looked for, not bound


def split_address(listen: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[V6]:PORT`. Raises ValueError."""
    host, colon, port = listen.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65_536):
        raise ValueError(f"{listen!r} is not HOST:PORT")
    if host.startswith("[") != host.endswith("]") or (":" in host and not host.startswith("[")):
        raise ValueError(f"{listen!r} is not [IPV6]:PORT")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether a host, as an address (IPv6 in brackets or not) or a name, is certainly this machine's own. A name other
    than localhost may be anything."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def reachable(url: str) -> str:
    """The URL by which this machine reaches a listener: loopback in place of every interface."""
    for every, loopback in EVERY_INTERFACE.items():
        url = url.replace(f"//{every}:", f"//{loopback}:", 1)
    return url
