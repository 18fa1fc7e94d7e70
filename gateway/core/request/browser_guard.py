"""Protection against DNS rebinding and cross-origin requests, for a gateway that asks for no keys.

Without keys, any web page in a browser could send calls. It can point its own host name at this machine (DNS
rebinding); the Host header shows that. Or it can call across origins; the Origin header shows that.

Calls from this machine must therefore name the gateway by an IP address, `localhost`, or one of `server.hosts`. Where
`server.hosts` has names, every call must. Pages of `cors` are let in. Programs that are no browser send any
Host they like, and no Origin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.core.request.cors import ALL
from gateway.core.request.outcome import Outcome, Refused
from gateway.shared.addresses import is_address

_LOOPBACK = ("127.", "::1", "::ffff:127.")


class BrowserGuard:
    """The check for one policy. `hosts`: names without a port; `origins`: as in `cors`."""

    def __init__(self, hosts: Iterable[str], origins: Iterable[str]) -> None:
        self._hosts = frozenset(hosts)
        self._everybody = bool(self._hosts)  # `server.hosts` holds for all peers, not for loopback alone
        self._origins = frozenset(origins)
        self._good = b""  # the last Host that passed the check: clients repeat it

    def check(self, fields: Mapping[bytes, bytes], peer: str) -> None:
        """Raise Refused (FORBIDDEN) for a request with the headers `fields`. `peer`: an address, or `unix`, which no
        browser can be."""
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
        return name in self._hosts or name == "localhost" or name.endswith(".localhost") or is_address(name)

    def _check_origin(self, origin: str, host: str) -> None:
        if origin in self._origins or ALL in self._origins or origin.partition("://")[2] == host:
            return
        raise Refused(
            Outcome.FORBIDDEN,
            f"This gateway asks for no keys, so it takes no calls from the web page {origin[:80]}. Name its origin in "
            "cors to let it in.",
            code="cross_origin",
        )
