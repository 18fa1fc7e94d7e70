"""Allow list for addresses that a sidecar names: its engines', which get prompts, and its own, which gets the token.

Only IP literals and `localhost` are allowed, and of paths that of a sidecar's relay. A host name could resolve to
anything at the moment of use, and the operator allowed networks. A loopback address or a unix socket belongs to one
machine, so only a sidecar on this machine may name one. From elsewhere it would mean some local service that was never
meant for calls.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

from gateway.shared.protocol import ENGINES_PATH

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_HTTP = re.compile(r"https?://(\[[0-9A-Fa-f:.]{2,45}\]|[0-9.]{7,15}|localhost)(?::([0-9]{1,5}))?/?")
_RELAYED = re.compile(rf"(https?://[^/]+){ENGINES_PATH}[a-z0-9][a-z0-9_.-]{{0,63}}")
_UNIX = re.compile(r'unix:///[!"$->@-~]{1,106}')  # as long as a path may be; no ? and no #
_LOOPBACK = ipaddress.IPv4Address("127.0.0.1")


def networks_of(allow: Iterable[str]) -> tuple[Network, ...]:
    """The networks of a policy. Raises ValueError for one that is malformed; the policy's rules refuse those."""
    return tuple(ipaddress.ip_network(each) for each in allow)


def refusal(url: str, allowed: Sequence[Network], *, local: bool, sockets: bool = True, secure: bool = False) -> str:
    """The reason why `url` may not be used; empty: it may.

    `local`: whether the sidecar that names it is on this machine. `sockets`: whether a unix socket is accepted, and the
    path of a relay. `secure`: whether other machines must have TLS.
    """
    if sockets and _UNIX.fullmatch(url):
        return "" if local else "a unix socket of another machine"
    relayed = _RELAYED.fullmatch(url) if sockets else None
    match = _HTTP.fullmatch(url if relayed is None else relayed[1])
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
    if secure and not address.is_loopback and not url.startswith("https:"):
        return "not https://, as fleet.sidecars.tls asks for"
    return "" if local or not address.is_loopback else "a loopback address of another machine"


def is_relayed(url: str) -> bool:
    """Whether an engine's URL is at a sidecar's relay, which asks for the order token."""
    return _RELAYED.fullmatch(url) is not None


def is_loopback(host: str) -> bool:
    """Whether a peer is on this machine: it has a loopback address, or no IP address (a unix socket)."""
    address = _address(host)
    return address is None or address.is_loopback


def _address(host: str) -> Address | None:
    if host == "localhost":
        return _LOOPBACK
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    # An IPv4-mapped IPv6 address reaches the IPv4 host, so it is checked as the IPv4 address.
    return getattr(address, "ipv4_mapped", None) or address
