"""Errors of sockets, TLS and names, as a reason of `core/engines/trouble.py` and in words."""

from __future__ import annotations

import errno
import socket
import ssl

from gateway.core.engines.trouble import OWN

# OpenSSL's X509_V_ERR_*: of the certificate's time, of the name or address it is for. Any other is a want of trust.
EXPIRED = frozenset({10})
OTHER_NAME = frozenset({62, 63, 64})
REFUSED = frozenset({errno.ECONNREFUSED})
RESET = frozenset({errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED})
FULL = frozenset({errno.EMFILE, errno.ENFILE})  # descriptors: the trouble is this process's, not the engine's
WORDS = {
    errno.ECONNREFUSED: "connection refused",
    errno.EHOSTUNREACH: "no route to the host",
    errno.ENETUNREACH: "no route to its network",
    errno.ENOENT: "there is no such socket",
    errno.EACCES: "permission to connect denied",
    **dict.fromkeys(FULL, "this gateway has no file descriptor left"),
}


class UnknownName(OSError):
    """A host name without an address, as far as the name servers say."""


class ForbiddenAddress(OSError):
    """A host without an address in the network where it must be."""


def reason_of(error: OSError) -> tuple[str, str]:
    """The reason of a connection that failed, and what to tell an operator."""
    if isinstance(error, UnknownName):
        return "name", str(error)
    if isinstance(error, ForbiddenAddress):
        return "unreachable", str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        said = error.verify_message
        if error.verify_code in EXPIRED:
            return "tls_expired", f"its TLS certificate has expired ({said})"
        if error.verify_code in OTHER_NAME:
            return "tls_name", f"its TLS certificate is for another name: {said.rstrip('.')}"
        return "tls_untrusted", f"its TLS certificate is not trusted: {said}"
    if isinstance(error, ssl.SSLError):
        said = (error.reason or str(error)).lower().replace("_", " ")
        return "tls", f"TLS failed: {said}; does it speak https?"
    if error.errno in RESET or isinstance(error, ConnectionResetError | BrokenPipeError):
        return "reset", "the connection was reset"
    reason = "refused" if error.errno in REFUSED else OWN if error.errno in FULL else "unreachable"
    return reason, WORDS.get(error.errno or 0, error.strerror or str(error))


def unknown_name(host: str, error: OSError | UnicodeError) -> UnknownName:
    """Error for a host that does not resolve, with the words of the name servers, or of this machine."""
    said = error.strerror if isinstance(error, socket.gaierror) else str(error)
    return UnknownName(f"the name {host} does not resolve: {said}")
