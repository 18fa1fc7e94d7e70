"""Certificates of tests' own servers, made by openssl."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest


def made(folder: Path, name: str) -> ssl.SSLContext:
    """The server's context for a certificate made here; FOLDER/NAME.pem is what a client has to trust."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate with")
    key, cert = str(folder / f"{name}.key"), str(folder / f"{name}.pem")
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context
