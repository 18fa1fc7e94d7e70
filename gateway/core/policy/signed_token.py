"""Verification of a caller's JSON Web Token (RFC 7519) by the issuer's public keys, a JWK Set (RFC 7517).

A key has one algorithm: its `alg`, else the usual one of its type. The token's header must name the same, so that no
token chooses how it is verified. Symmetric keys are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jwt
import msgspec

from gateway.core.policy.auth import AuthPolicy

LEEWAY = 5.0  # seconds by which the issuer's clock may be ahead
MOST_BYTES = 256 * 1024  # of a JWK Set
MOST_TOKEN = 8192  # bytes
MOST_KEYS = 100
MOST_TRIED = 4  # keys for one token: each costs a verification, also for a stranger
LEAST_RSA = 2048  # bits, as RFC 7518 section 3.3 has it
ALGORITHMS = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}
)  # fmt: skip
_USUAL = {"RSA": "RS256", "P-256": "ES256", "P-384": "ES384", "P-521": "ES512", "Ed25519": "EdDSA"}
# The signature alone: claims are checked here, by a clock that is given.
_SIGNATURE_ALONE: Any = {
    "verify_signature": True,
    **dict.fromkeys([f"verify_{claim}" for claim in ("exp", "nbf", "iat", "aud", "iss", "sub", "jti")], False),
}
_MALFORMED = (jwt.PyJWTError, ValueError, TypeError, KeyError, RecursionError)


class TokenFault(Exception):
    """A token that is not accepted. The message names the check that failed, and shows nothing of the token."""


class UnknownKey(TokenFault):
    """No key of the set has signed the token. The issuer may have a new one."""


class Verified(msgspec.Struct, frozen=True):
    """A token's claims that count. `class_name`: empty: none. `until`: Unix time of its end."""

    tenant: str
    class_name: str
    until: float


class KeySet:
    """An issuer's public keys. Keys may share a `kid`, or have none."""

    def __init__(self, data: bytes) -> None:
        """Read a JWK Set, without keys of other kinds or for encryption. Raises ValueError where none is left."""
        if len(data) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        try:
            keys = msgspec.json.decode(data)["keys"]
        except (msgspec.MsgspecError, ValueError, TypeError, KeyError, RecursionError):
            raise ValueError("no JWK Set, an object with the list `keys`") from None
        if not isinstance(keys, list) or len(keys) > MOST_KEYS:
            raise ValueError(f"no list of at most {MOST_KEYS} keys")
        self._keys: list[jwt.PyJWK] = []
        left_out = []
        for jwk in keys:
            key = _public_key(jwk)
            if isinstance(key, str):
                left_out.append(key)
            else:
                self._keys.append(key)
        if not self._keys:
            raise ValueError(f"no public key that verifies tokens ({'; '.join(sorted(set(left_out))) or 'no keys'})")

    def verified(self, token: bytes, auth: AuthPolicy, now: float) -> Verified:
        """Return the claims of a token that holds at `now`, Unix time. Raises TokenFault."""
        if len(token) > MOST_TOKEN:
            raise TokenFault(f"it has more than {MOST_TOKEN} bytes")
        try:
            header = jwt.get_unverified_header(token)
        except _MALFORMED:
            raise TokenFault("it is no signed JWT") from None
        algorithm = header.get("alg")
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise TokenFault("its algorithm (`alg`) is none of public keys; `none` and HMAC are not accepted")
        if "crit" in header:
            raise TokenFault("it has extensions (`crit`) that this gateway does not know")
        for key in self._candidates(header.get("kid"), algorithm):
            try:
                claims = jwt.decode(token, key, algorithms=[algorithm], options=_SIGNATURE_ALONE)
            except jwt.InvalidSignatureError:
                continue
            except _MALFORMED:
                raise TokenFault("it is no signed JWT") from None
            return _checked(claims, auth, now)
        raise UnknownKey("its signature is not that of the issuer's key")

    def _candidates(self, id: str | None, algorithm: str) -> list[jwt.PyJWK]:
        """Return the keys that may have signed a token: those of its `kid`; without one, all. Raises TokenFault."""
        named = [key for key in self._keys if id is None or key.key_id == id]
        if not named:
            raise UnknownKey("its key (`kid`) is not among the issuer's keys")
        found = [key for key in named if key.algorithm_name == algorithm]
        if not found:
            raise TokenFault("its algorithm (`alg`) is not that of the issuer's key")
        if len(found) > MOST_TRIED:
            raise TokenFault("it does not say which of the issuer's keys it means (`kid`)")
        return found


def _public_key(jwk: Any) -> jwt.PyJWK | str:
    """The key; the reason why it is none that verifies tokens."""
    if not isinstance(jwk, dict):
        return "no object"
    if "d" in jwk or jwk.get("kty") == "oct":
        return "a private or symmetric key"
    if jwk.get("use", "sig") != "sig":
        return "a key for encryption"
    algorithm = jwk.get("alg", _USUAL.get(str(jwk.get("crv", jwk.get("kty")))))
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS or not isinstance(jwk.get("kid", ""), str):
        return "a key of another algorithm"
    try:
        key = jwt.PyJWK(jwk, algorithm)
    except _MALFORMED:
        return "a malformed key"
    if jwk["kty"] == "RSA" and key.key.key_size < LEAST_RSA:
        return f"an RSA key of less than {LEAST_RSA} bits"
    return key


def _checked(claims: Mapping[str, Any], auth: AuthPolicy, now: float) -> Verified:
    """The claims that count. Raises TokenFault."""
    audience = claims.get("aud")
    if claims.get("iss") != auth.issuer:
        raise TokenFault("it is of another issuer (`iss`)")
    if auth.audience not in (audience if isinstance(audience, list) else [audience]):
        raise TokenFault("it is for another audience (`aud`)")
    until, begins, issued = (_time(claims, name) for name in ("exp", "nbf", "iat"))
    if until is None:
        raise TokenFault("it has no end (`exp`)")
    if now >= until:
        raise TokenFault("it has expired (`exp`): get a new one from its issuer")
    if begins is not None and begins > now + LEEWAY:
        raise TokenFault("it does not hold yet (`nbf`)")
    if issued is not None and issued > now + LEEWAY:
        raise TokenFault("it was issued in the future (`iat`)")
    tenant = claims.get(auth.tenant_claim)
    asked = None if auth.class_claim is None else claims.get(auth.class_claim)
    if not isinstance(tenant, str) or not isinstance(asked, str | None):
        raise TokenFault("the claim that names its tenant or class is missing, or no text")
    return Verified(tenant, asked or "", until)


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    found = claims.get(name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) < 2**53:
        raise TokenFault(f"its `{name}` is no time")
    return float(found)
