"""Policy of callers' tokens: JSON Web Tokens (RFC 7519) that an issuer signs, accepted beside API keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from gateway.core.engines.origin import Origin, parse_origin
from gateway.shared.addresses import is_loopback
from gateway.shared.files.checked import Fault
from gateway.shared.files.kinds import Text

Issued = Annotated[str, Text(r"[!-~]{1,512}", "an issuer or audience without spaces, as the tokens have it")]
JwksAt = Annotated[str, Text(r"[^\x00-\x1f]{1,4096}", "a file name or https://HOST/PATH")]
Claim = Annotated[str, Text(r"[!-~]{1,200}", "the name of a claim, without spaces")]


class AuthPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """JSON Web Tokens of an issuer, accepted beside API keys. They need the extra `jwt`.

    `issuer`: Issuer of the tokens: their claim iss, character for character.
    `audience`: This gateway's name in the tokens' claim aud.
    `jwks`: The issuer's public keys, a JWK Set: a file, or its address, https:// (http:// on this machine). The address
    is read every 5 min, and for a token of an unknown key. Without an answer the known keys are valid for a day.
    `tenant_claim`: Claim that names the caller's tenant.
    `class_claim`: Claim that names the caller's class: that of calls that name none, and the most important that it may
    ask for; null, or no such claim: as the tenant's other callers.
    """

    issuer: Issued
    audience: Issued
    jwks: JwksAt
    tenant_claim: Claim = "tenant"
    class_claim: Claim | None = None

    @property
    def jwks_url(self) -> str | None:
        """Address of the keys; None: a file has them."""
        return self.jwks if self.jwks.casefold().startswith(("http://", "https://")) else None


def auth_faults(auth: AuthPolicy | None, tenants: Iterable[str]) -> Iterator[Fault]:
    """Settings by which nobody could be let in, or keys that someone on the way could replace."""
    if auth is None:
        return
    if not set(tenants) - {"anonymous"}:
        found = "auth, and no tenant but anonymous: its tokens would let nobody in"
        yield Fault(("auth",), found, "tenants whom tokens can name")
    if auth.jwks_url is not None:
        yield from _url(auth.jwks_url)


def key_address(url: str) -> tuple[Origin, bytes]:
    """Return the server of a JWK Set, and what is asked of it: path and query. Raises ValueError."""
    parts = urlsplit(url)
    if "#" in url:
        raise ValueError(f"{url!r}: a fragment, which no server is sent")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return parse_origin(f"{parts.scheme}://{parts.netloc}"), target.encode()


def _url(url: str) -> Iterator[Fault]:
    try:
        origin, _ = key_address(url)
    except ValueError as error:
        yield Fault(("auth", "jwks"), str(error), "https://HOST/PATH of a JWK Set")
        return
    if not origin.tls and not is_loopback(origin.host):
        found = f"{url}: whoever is on the way could replace the keys"
        yield Fault(("auth", "jwks"), found, "https://, or http:// of this machine")
