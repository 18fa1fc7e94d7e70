"""Authentication: from API key, proxy header and peer address to the tenant's `Account`.

Keys are stored as SHA-256 digests. They are random, so a digest needs no salt and no stretching. Look-up and
comparison use the digest of what the client sent, so timing does not reveal how close a guess is. A wrong key and a
missing key get the same answer. A header may name the tenant only where the policy trusts the peer.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Awaitable, Iterator, Mapping
from typing import TYPE_CHECKING, NoReturn, Protocol

import msgspec

from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import Tenant
from gateway.core.policy.types import OF_NOTHING
from gateway.core.request.outcome import Outcome, Refused
from gateway.shared.files.checked import InvalidFile, Mark, Problem, nearest

if TYPE_CHECKING:  # it needs PyJWT, which is an extra
    from gateway.core.policy.signed_token import Verified

ANONYMOUS = "anonymous"
MIRROR = "(mirror)"  # owner of mirrored copies of calls; no tenant of a policy can have the name
MAX_KEYS = 100_000
MAX_KEYS_BYTES = 16 * 1024**2  # 100k lines of the longest names, with a date
NAMED_BY_PROXY = b"x-tenant"  # the tenant, as a trusted proxy says
PEERS_REMEMBERED = 1024

_HASH = re.compile(rb"[0-9a-f]{64}")
_TENANT = re.compile(rb"[a-z0-9][a-z0-9_.-]{0,63}")
_LINE = "the SHA-256 of a key (64 hexadecimal digits in lower case), then a tenant's name"
_UNKNOWN: tuple[bytes, None] = (bytes(32), None)  # a digest of no key that could be found


def keys_from(data: bytes, file: str) -> dict[str, str]:
    """Read a keys file as {SHA-256 in hexadecimal: tenant}. Raises InvalidFile with every problem.

    A line is `SHA256HEX TENANT [comment]`, a comment that begins with `#`, or blank. `file`: its name in messages. No
    message shows the text in place of a hash, since it may be a key.
    """
    problems: list[Problem] = []

    def problem(line: int, found: str, expected: str) -> None:
        problems.append(Problem(file=file, at=Mark(line), found=found, expected=expected))

    if len(data) > MAX_KEYS_BYTES:
        problem(1, f"{len(data)} bytes", f"at most {MAX_KEYS_BYTES} bytes")
        raise InvalidFile(problems)
    keys: dict[str, str] = {}
    lines: dict[str, int] = {}
    for line, _, (digest, *rest) in key_lines(data):
        if not _HASH.fullmatch(digest):
            problem(line, f"{len(digest)} characters instead of the hash", _LINE)
        elif digest.decode() == OF_NOTHING:
            problem(
                line,
                "the SHA-256 of an empty key: callers without a key would be this tenant",
                "the SHA-256 of a key",
            )
        elif not rest:
            problem(line, "no tenant after the hash", _LINE)
        elif not _TENANT.fullmatch(rest[0]):
            problem(line, ascii(rest[0][:60].decode("latin-1")), "a tenant's name as in the policy")
        elif (key := digest.decode()) in keys:
            problem(line, f"the key of line {lines[key]} again", "each key once")
        else:
            keys[key], lines[key] = rest[0].decode(), line
    if len(keys) > MAX_KEYS:
        problem(1, f"{len(keys)} keys", f"at most {MAX_KEYS}")
    if problems:
        raise InvalidFile(problems)
    return keys


def key_lines(data: bytes) -> Iterator[tuple[int, int, list[bytes]]]:
    """The lines of a keys file that are neither blank nor comments: number (from 1), offset in bytes, words.

    There are up to three words: the hash, the tenant, and the rest of the line.
    """
    offset = 0
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        words = line.removeprefix(b"\xef\xbb\xbf").split(None, 2)
        if words and not words[0].startswith(b"#"):
            yield number, offset, words
        offset += len(line)


def with_keys(policy: Policy, keys: Mapping[str, str], file: str) -> Policy:
    """The policy with a keys file's keys added to its tenants'. Raises InvalidFile with every problem: a key of a
    tenant that the policy does not have, or a key that another tenant has."""
    owners = {digest: name for name, tenant in policy.tenants.items() for digest in tenant.keys}
    problems: list[Problem] = []
    added: dict[str, list[str]] = {}
    for digest, name in keys.items():
        owner = owners.get(digest, name)
        if name not in policy.tenants:
            hint = nearest(name, policy.tenants)
            problems.append(_of_key(file, digest, f"the tenant {name}", "a tenant of the policy", hint))
        elif owner != name:
            problems.append(_of_key(file, digest, f"the tenant {name}", f"{owner}, whose key it is in the policy"))
        elif digest not in owners:
            added.setdefault(name, []).append(digest)
    if problems:
        raise InvalidFile(problems)
    tenants = {
        name: msgspec.structs.replace(tenant, keys=(*tenant.keys, *added.get(name, ())))
        for name, tenant in policy.tenants.items()
    }
    return msgspec.structs.replace(policy, tenants=tenants)


def _of_key(file: str, digest: str, found: str, expected: str, hint: str | None = None) -> Problem:
    return Problem(file=file, path=f"{digest[:12]}...", found=found, expected=expected, nearest=hint)


class TokenCheck(Protocol):
    """Whoever verifies tokens of an issuer. `jwks`: its keys where a file has them, else empty."""

    jwks: bytes

    def holder(self, token: bytes, digest: bytes) -> Verified:
        """Return the claims of a token, whose SHA-256 is `digest`. Raises Refused."""

    def keys_read(self) -> Awaitable[None]:
        """Wait until the reading under way has ended."""


class Account:
    """A tenant, prepared for its calls.

    `claimed`: the class that a caller's token names, the most important of its calls; empty: none. `best`: rank of the
    most important class it may ask for, 0: any. `models`: those it may use, empty: all. `cache_salt`: a JSON field for
    the body of each of its calls, with a comma before it; empty: none. `refusal`: its own refusal answer.
    """

    __slots__ = ("best", "cache_salt", "claimed", "default_class", "models", "name", "refusal", "weight")

    def __init__(self, name: str, tenant: Tenant, classes: list[str], cache_salt: bytes, claimed: str = "") -> None:
        self.name = name
        self.claimed = claimed
        self.cache_salt = cache_salt
        self.default_class = tenant.class_
        self.best = 0 if tenant.best_class is None else classes.index(tenant.best_class)
        self.weight = tenant.weight
        self.models = frozenset(tenant.models)
        self.refusal = tenant.refusal


class Tenants:
    """The accounts of one policy, and their keys. Each reload makes a new one, without the keys that were removed.

    Raises ValueError where `trusted_proxies` holds something that is no address.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        cache_secret: bytes = b"",
        tokens: TokenCheck | None = None,
    ) -> None:
        """`cache_secret`: the secret that cache salts are derived from; empty: no salts. `tokens`: who verifies tokens;
        None: none are."""
        self.tokens = tokens
        self._policy = policy
        isolated = policy.routing.cache_isolation == "tenant" and len(policy.tenants) > 1
        self._secret = cache_secret if isolated else b""
        self.accounts = {name: self._account(name) for name in policy.tenants}
        self._claimed: dict[tuple[str, str], Account] = {}  # by tenant and class, as tokens have named them
        self.mirror = Account(MIRROR, Tenant(), list(policy.classes), b"")
        self._by_digest: dict[bytes, tuple[bytes, Account | None]] = {}
        for name, tenant in policy.tenants.items():
            for digest in map(bytes.fromhex, tenant.keys):
                self._by_digest.setdefault(digest, (digest, self.accounts[name]))
        self._anonymous = self.accounts.get(ANONYMOUS)
        # SDKs send a key even to servers without keys (`api_key="none"`). So without any keys every key is accepted.
        self._keyless = not self._by_digest and policy.keys_file is None and policy.auth is None
        self._proxies = bool(policy.trusted_proxies)
        self._open = self._anonymous if self._keyless and not self._proxies else None  # everybody's account
        self._networks = [
            ipaddress.ip_network(network, strict=False) for network in policy.trusted_proxies if network != "unix"
        ]
        self._peers = {"unix": "unix" in policy.trusted_proxies}  # peer -> whether trusted

    @property
    def open(self) -> bool:
        """Whether every caller is let in, whatever it sends."""
        return self._open is not None

    @property
    def keyed(self) -> bool:
        """Whether callers have keys, or may be given some while this policy is active."""
        return not self._keyless

    def identify(self, headers: Mapping[bytes, bytes], peer: str) -> Account:
        """The account of a request. `headers` maps lower-cased names to values; `peer` is an address or `unix`.

        Order: a trusted proxy's header, `Authorization: Bearer KEY`, `x-api-key: KEY`, the tenant `anonymous`. In place
        of a key there may be an issuer's token. Raises Refused (UNAUTHORIZED), with the same message for every cause;
        for a token the message names the check that failed. Raises AwaitsKeys while the issuer's keys are read.
        """
        if self._open is not None:
            return self._open
        if self._proxies and NAMED_BY_PROXY in headers and self.trusts(peer):
            account = self.accounts.get(headers[NAMED_BY_PROXY].decode("latin-1"))
            return account or _unauthorized()
        given = headers.get(b"authorization")
        if given is None:
            key = headers.get(b"x-api-key")
            if key is None and self._anonymous is not None:
                return self._anonymous
        else:
            key = given[7:].strip() if given[:7].lower() == b"bearer " else b""
        digest = hashlib.sha256(key or b"").digest()
        known, found = self._by_digest.get(digest, _UNKNOWN)
        if hmac.compare_digest(known, digest) and found is not None:
            return found
        if self.tokens is not None and key is not None and key.count(b".") == 2:
            return self._holder(self.tokens.holder(key, digest))
        if self._keyless and self._anonymous is not None:
            return self._anonymous
        return _unauthorized()

    def account(self, name: str) -> Account | None:
        """The account of a tenant, or of mirrored copies, by name. No caller can name the latter."""
        return self.mirror if name == MIRROR else self.accounts.get(name)

    def _account(self, name: str, claimed: str = "") -> Account:
        salt = _cache_salt(self._secret, name)
        return Account(name, self._policy.tenants[name], list(self._policy.classes), salt, claimed)

    def _holder(self, token: Verified) -> Account:
        """The account of a token's holder. Raises Refused."""
        tenant, class_name = token.tenant, token.class_name
        if tenant not in self.accounts:
            raise Refused(Outcome.UNAUTHORIZED, "The token was refused: it names no tenant of this gateway.")
        if not class_name:
            return self.accounts[tenant]
        if class_name not in self._policy.classes:
            raise Refused(Outcome.UNAUTHORIZED, "The token was refused: it names no class of this gateway.")
        found = self._claimed.get((tenant, class_name))
        if found is None:
            found = self._claimed[tenant, class_name] = self._account(tenant, class_name)
        return found

    def has_key(self, key: str) -> bool:
        """Whether `key` is a tenant's. Takes the same time for every key."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        known, account = self._by_digest.get(digest, _UNKNOWN)
        return hmac.compare_digest(known, digest) and account is not None

    def trusts(self, peer: str) -> bool:
        """Whether `peer` is a trusted front proxy. Answers are cached for PEERS_REMEMBERED peers."""
        trusted = self._peers.get(peer)
        if trusted is None:
            try:
                address = ipaddress.ip_address(peer)
            except ValueError:
                return False
            if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
                address = address.ipv4_mapped  # an IPv4 client of a socket that listens on [::]
            trusted = any(address in network for network in self._networks)
            if len(self._peers) < PEERS_REMEMBERED:
                self._peers[peer] = trusted
        return trusted


def _cache_salt(secret: bytes, tenant: str) -> bytes:
    """The JSON field with a tenant's vLLM `cache_salt`. It cannot be guessed, and changes only with the secret."""
    if not secret:
        return b""
    digest = hmac.digest(secret, b"cache_salt of " + tenant.encode(), "sha256")
    return b',"cache_salt":"%b"' % base64.urlsafe_b64encode(digest).rstrip(b"=")


def _unauthorized() -> NoReturn:
    message = "No valid API key. Send one as `Authorization: Bearer KEY`, or ask whoever runs this gateway for one."
    raise Refused(Outcome.UNAUTHORIZED, message)
