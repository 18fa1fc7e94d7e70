"""Trust in the certificates that engines and sidecars show over TLS."""

from __future__ import annotations

import ssl

import msgspec


class Trust(msgspec.Struct, frozen=True, kw_only=True):
    """Certificates to accept. `ca`: who signs them, in PEM; None: the system's authorities. `name`: whom they are for;
    None: the host that is called."""

    ca: str | None = None
    name: str | None = None

    def context(self) -> ssl.SSLContext:
        """For connections. Raises ssl.SSLError where `ca` holds no certificate."""
        return ssl.create_default_context(cadata=self.ca)
