"""Certificates of tests' own servers, made by openssl."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest


def certificate(
    folder: Path, name: str = "localhost", *, host: str = "localhost", expired: bool = False
) -> tuple[Path, Path]:
    """Make a certificate for `host`, which signs itself, and its key: FOLDER/NAME.pem and FOLDER/NAME.key. Skips the
    test where there is no openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate with")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{host}", "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )  # fmt: skip
    if expired:
        again = [openssl, "x509", "-in", cert, "-signkey", key, "-days", "-1", "-out", cert]
        subprocess.run(again, check=True, capture_output=True)
    return cert, key


def made(folder: Path, name: str = "localhost", **of: Any) -> ssl.SSLContext:
    """Return a server's context with a certificate made here; FOLDER/NAME.pem is what a client has to trust. `of`: as
    in `certificate`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate(folder, name, **of))
    return context
