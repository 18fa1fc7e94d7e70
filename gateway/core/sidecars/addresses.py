"""Which addresses a sidecar may name: of its engines, which get every prompt, and its own, which gets the token.

Only IP literals and `localhost` count: a host name is whatever a name server says at the moment it is asked, and the
operator allowed networks. What is this machine's alone (a loopback address, a unix socket) may only be named by a
sidecar on this machine: said by another one it would be some service of ours that was never meant for calls.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_HTTP = re.compile(r"https?://(\[[0-9A-Fa-f:.]{2,45}\]|[0-9.]{7,15}|localhost)(?::([0-9]{1,5}))?/?")
_UNIX = re.compile(r'unix:///[!"$->@-~]{1,106}')  # as long as a path may be; no ? and no #
_LOOPBACK = ipaddress.IPv4Address("127.0.0.1")


def networks_of(allow: Iterable[str]) -> tuple[Network, ...]:
    """The networks of a policy. Raises ValueError for what is none; policy_rules.py has found those."""
    return tuple(ipaddress.ip_network(each) for each in allow)


def refusal(url: str, allowed: Sequence[Network], *, local: bool, sockets: bool = True) -> str:
    """Why `url` may not be used, in words; empty: it may. `local`: who names it is on this machine. `sockets`: a unix
    socket will do."""
    if sockets and _UNIX.fullmatch(url):
        return "" if local else "a unix socket is another machine's"
    match = _HTTP.fullmatch(url)
    if match is None:
        forms = "http(s)://ADDRESS:PORT or unix:///PATH" if sockets else "http(s)://ADDRESS:PORT"
        return f"not {forms} with an IP address or localhost"
    if int(match[2] or 80) not in range(1, 65_536):
        return "there is no such port"
    address = _address(match[1])
    if address is None:
        return "not an IP address"
    if not any(address in network for network in allowed):
        return "not in a network of fleet.sidecars.allow"
    return "" if local or not address.is_loopback else "a loopback address is another machine's"


def is_loopback(host: str) -> bool:
    """Whether a peer's address is this machine's own; what is no IP address, as a unix socket's, is."""
    address = _address(host)
    return address is None or address.is_loopback


def _address(host: str) -> Address | None:
    if host == "localhost":
        return _LOOPBACK
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    # An IPv4 address in IPv6's clothes reaches the same host, so it is judged as what it is.
    return getattr(address, "ipv4_mapped", None) or address
