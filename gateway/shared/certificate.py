"""TLS certificate of a listener, from its files to the context that handshakes use.

The files are watched as the policy is (watched_file.py): a new certificate is used for new connections within a second
of its last file's change, or on SIGHUP. One that cannot be used changes nothing, and the reason is told.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Callable
from pathlib import Path

import msgspec

from gateway.shared.files.modes import refused

Read = Callable[[Path], bytes]
Contents = dict[Path, bytes]  # of a certificate's files


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

    def loaded(self, read: Read) -> tuple[ssl.SSLContext, Contents]:
        """The context, and what the files hold. Raises OSError, ValueError."""
        contents: Contents = {}
        return self.context(lambda path: contents.setdefault(path, read(path))), contents

    def context_of(self, contents: Contents) -> ssl.SSLContext:
        """The context of what the files held before. It is read from memory: there is no other file that has it."""
        with contextlib.ExitStack() as stack:
            kept = {path: _in_memory(data, stack) for path, data in contents.items()}
            files = [None if file is None else kept[file] for file in (self.chain, self.key, self.client_ca)]
            return Certificate(files[0] or self.chain, *files[1:]).context(Path.read_bytes)

    def renew(self, context: ssl.SSLContext, _: object = None) -> None:
        """Have a context that listens already show the certificate that the files hold now, from the next handshake on:
        for a listener that keeps its context. Raises OSError, ssl.SSLError."""
        context.load_cert_chain(self.chain, self.key, password=_no_password)


def _in_memory(data: bytes, stack: contextlib.ExitStack) -> Path:
    """A file of this process alone, until the stack ends: OpenSSL takes a chain and its key from files."""
    file = stack.enter_context(os.fdopen(os.memfd_create("certificate"), "wb"))
    os.fchmod(file.fileno(), 0o600)
    file.write(data)
    file.flush()
    return Path(f"/proc/self/fd/{file.fileno()}")


def authorities_in(data: bytes) -> str:
    """Text of a file of certificates for `ssl`, which takes no comment that is not ASCII. An empty file gives no empty
    text, for which `ssl` would trust the system's authorities."""
    return data.decode("ascii", "ignore") or "\n"


def _no_password() -> str:
    """Refuse an encrypted key: OpenSSL would ask for its passphrase at the terminal, and the process would hang."""
    raise ValueError("the key of the certificate is encrypted; give one without a passphrase")
