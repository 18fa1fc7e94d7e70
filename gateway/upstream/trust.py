"""Trust in the certificates that engines and sidecars show over TLS."""

from __future__ import annotations

import ssl
from functools import lru_cache

import msgspec


class Trust(msgspec.Struct, frozen=True, kw_only=True):
    """Certificates to accept. `ca`: who signs them, in PEM; None: the system's authorities. `name`: whom they are for;
    None: the host that is called."""

    ca: str | None = None
    name: str | None = None

    def context(self) -> ssl.SSLContext:
        """For connections. Raises ssl.SSLError where `ca` holds no certificate."""
        return ssl.create_default_context(cadata=self.ca)

    @property
    def shared(self) -> ssl.SSLContext:
        """The context of all engines that show certificates of these authorities. To read the system's takes 20 ms and
        a megabyte, and engines may be thousands. Raises as `context`."""
        return _shared(self.ca)


@lru_cache(maxsize=64)
def _shared(ca: str | None) -> ssl.SSLContext:
    return Trust(ca=ca).context()
