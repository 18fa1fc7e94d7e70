"""Dashboard: one file of markup, style and script, which may load nothing and calls only this port."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

import msgspec


class Page(msgspec.Struct, frozen=True):
    """The document and the Content-Security-Policy that lets its own style and script run, and nothing else."""

    body: bytes
    policy: str


def dashboard() -> Page:
    """Read from the package."""
    body = resources.files("gateway.control").joinpath("page.html").read_bytes()
    return Page(
        body,
        f"default-src 'none'; script-src {_hash(body, b'script')}; style-src {_hash(body, b'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'",
    )


def _hash(body: bytes, tag: bytes) -> str:
    """The one element of this name, as a source expression of the policy."""
    (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
