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


def is_address(host: str) -> bool:
    """Whether a host is an IP address, IPv6 without brackets, and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a host, as an address (IPv6 in brackets or not) or a name, is certainly this machine's own. A name other
    than localhost may be anything."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_private(host: str) -> bool:
    """Whether the address (or name) is within the house: of this machine, of a private or link-local network, or of
    any other that is not reached over the internet. A name other than localhost is not, as far as anybody can say."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.rstrip(".").rpartition(".")[2] == "localhost"
    inner = _inner(address)
    return not address.is_global or address.is_multicast or (inner is not None and is_private(str(inner)))


def is_public(host: str) -> bool:
    """Whether the host is an address that is reached over the internet, and no name."""
    return is_address(host.partition("%")[0]) and not is_private(host)


def _inner(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 address leads to: mapped, of 6to4, or of NAT64 (RFC 6052)."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if int(address) >> 32 == 0x64_FF9B << 64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour


def reachable(url: str) -> str:
    """The URL by which this machine reaches a listener: loopback in place of every interface."""
    for every, loopback in EVERY_INTERFACE.items():
        url = url.replace(f"//{every}:", f"//{loopback}:", 1)
    return url
