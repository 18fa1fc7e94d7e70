"""TLS certificate of a listener, from its files to the context that handshakes use.

The files are watched as the policy is (watched_file.py): a new certificate is used for new connections within a second
of its last file's change, or on SIGHUP. One that cannot be used changes nothing, and the reason is told.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import msgspec

from gateway.shared.files.modes import refused

Read = Callable[[Path], bytes]


class Certificate(msgspec.Struct, frozen=True):
    """Files in PEM. `key` None: it is in the chain's file. `client_ca`: who signs the certificates that clients must
    show; None: clients show none."""

    chain: Path
    key: Path | None = None
    client_ca: Path | None = None

    @property
    def private(self) -> Path:
        """The file that holds the private key."""
        return self.key or self.chain

    def context(self, read: Read) -> ssl.SSLContext:
        """TLS 1.2 or later with this certificate. `read` is how files are read, so that they are known to whoever
        watches. Raises OSError, and ValueError for files that are no certificate and its key."""
        files = [file for file in (self.chain, self.key, self.client_ca) if file is not None]
        for file in files:
            read(file)
        wrong = refused(self.private)
        if wrong is not None:
            raise ValueError(f"{self.private}: {wrong}")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.chain, self.key, password=_no_password)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except ssl.SSLError as error:
            raise ValueError(f"{', '.join(map(str, files))}: {error}") from None
        return context

    def renew(self, context: ssl.SSLContext, _: object = None) -> None:
        """Have a context that listens already show the certificate that the files hold now, from the next handshake on:
        for a listener that keeps its context. Raises OSError, ssl.SSLError."""
        context.load_cert_chain(self.chain, self.key, password=_no_password)


def authorities_in(data: bytes) -> str:
    """Text of a file of certificates for `ssl`, which takes no comment that is not ASCII. An empty file gives no empty
    text, for which `ssl` would trust the system's authorities."""
    return data.decode("ascii", "ignore") or "\n"


def _no_password() -> str:
    """Refuse an encrypted key: OpenSSL would ask for its passphrase at the terminal, and the process would hang."""
    raise ValueError("the key of the certificate is encrypted; give one without a passphrase")
