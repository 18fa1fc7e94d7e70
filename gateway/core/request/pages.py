"""Web pages and a gateway that asks nobody for a key: what a browser on the machine sends for them is refused.

Where any call is taken, a page in somebody's browser could make some: by a name of its own that it lets point to this
machine (DNS rebinding), which its Host shows, or across origins, which its Origin shows. So a call from this machine
must name the gateway by an address, `localhost` or one of `server.hosts`; with such names every call must. Pages of
`cors.origins` are let in. A program that is no browser sends what it likes, and no Origin.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping

from gateway.core.request.cors import ALL
from gateway.core.request.outcome import Outcome, Refused

_LOOPBACK = ("127.", "::1", "::ffff:127.")


class PageGuard:
    """The check, for one policy. `hosts`: names without a port; `origins`: as `cors.origins` has them."""

    __slots__ = ("_everybody", "_good", "_hosts", "_origins")

    def __init__(self, hosts: Iterable[str], origins: Iterable[str]) -> None:
        self._hosts = frozenset(hosts)
        self._everybody = bool(self._hosts)  # who sets names means them for all, not for loopback alone
        self._origins = frozenset(origins)
        self._good = b""  # the last Host that was found good: clients repeat it

    def check(self, fields: Mapping[bytes, bytes], peer: str) -> None:
        """Raises Refused (FORBIDDEN). `peer` is an address or `unix`, where no browser is."""
        if fields.get(b"host") == self._good and b"origin" not in fields:
            return  # nearly every request
        if not (self._everybody and peer != "unix") and not peer.startswith(_LOOPBACK):
            return
        host = fields.get(b"host", b"")
        if host != self._good and host:
            if not self._is_ours(host.decode("latin-1")):
                shown = host[:80].decode("latin-1")
                message = (
                    f"This gateway asks for no keys, so it takes no calls for the host {shown}: a web page could make "
                    "them. Use localhost or an address, or name the host in server.hosts."
                )
                raise Refused(Outcome.FORBIDDEN, message, code="misdirected_request")
            self._good = host
        origin = fields.get(b"origin")
        if origin is not None:
            self._check_origin(origin.decode("latin-1"), host.decode("latin-1"))

    def _is_ours(self, host: str) -> bool:
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].lower()
        if name in self._hosts or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _check_origin(self, origin: str, host: str) -> None:
        if origin in self._origins or ALL in self._origins or origin.partition("://")[2] == host:
            return
        raise Refused(
            Outcome.FORBIDDEN,
            f"This gateway asks for no keys, so it takes no calls of the web page {origin[:80]}. Name its origin in "
            "cors.origins to let it in.",
            code="cross_origin",
        )
