"""Errors of sockets, TLS and names: the reason each is counted under, and what an operator reads."""

from __future__ import annotations

import errno
import socket
import ssl

import pytest

from gateway.core.engines.trouble import OWN, REASONS
from gateway.upstream.connection import REASONS_OF
from gateway.upstream.failures import reason_of, unknown_name


def certificate(code: int, said: str) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, said
    return error


def tls(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, "it failed")
    error.reason = reason
    return error


TABLE = [
    (ConnectionRefusedError(errno.ECONNREFUSED, "x"), "refused", "connection refused"),
    (OSError(errno.EHOSTUNREACH, "x"), "unreachable", "no route to the host"),
    (OSError(errno.ENETUNREACH, "x"), "unreachable", "no route to its network"),
    (FileNotFoundError(errno.ENOENT, "x"), "unreachable", "there is no such socket"),
    (PermissionError(errno.EACCES, "x"), "unreachable", "permission to connect denied"),
    (OSError(errno.EADDRNOTAVAIL, "cannot assign"), "unreachable", "cannot assign"),
    (OSError("no more is known"), "unreachable", "no more is known"),
    (ConnectionResetError(errno.ECONNRESET, "x"), "reset", "the connection was reset"),
    (ConnectionResetError("in the handshake"), "reset", "the connection was reset"),
    (OSError(errno.EMFILE, "x"), OWN, "this gateway has no file descriptor left"),
    (certificate(10, "certificate has expired"), "tls_expired",
     "its TLS certificate has expired (certificate has expired)"),
    (certificate(18, "self-signed certificate"), "tls_untrusted",
     "its TLS certificate is not trusted: self-signed certificate"),
    (certificate(62, "Hostname mismatch, certificate is not valid for 'a'."), "tls_name",
     "its TLS certificate is for another name: Hostname mismatch, certificate is not valid for 'a'"),
    (tls("WRONG_VERSION_NUMBER"), "tls", "TLS failed: wrong version number; does it speak https?"),
    (unknown_name("vllm-1", socket.gaierror(socket.EAI_NONAME, "Name or service not known")), "name",
     "the name vllm-1 does not resolve: Name or service not known"),
    (unknown_name("a", UnicodeError("label too long")), "name", "the name a does not resolve: label too long"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "reason", "words"), TABLE, ids=[row[2] for row in TABLE])
def test_every_error_has_a_reason_and_words(error: OSError, reason: str, words: str) -> None:
    assert reason_of(error) == (reason, words)
    assert reason in REASONS


def test_every_kind_of_failure_has_a_reason() -> None:
    assert set(REASONS_OF.values()) <= set(REASONS)
