"""Loading of a configuration: the policy file, and the secrets in the files that it names.

Secrets are never part of the policy. `gateway check`, the start and every reload use this module, so all of them refuse
the same files. File names in a policy are relative to its own folder. Files are read by a function that the caller
passes, which thus knows which files to watch.
"""

from __future__ import annotations

import importlib.util
import ssl
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path

import msgspec

from gateway.core.policy.file import read_policy
from gateway.core.policy.policy import Policy
from gateway.core.policy.types import Secret
from gateway.core.request.tenants import keys_from, with_keys
from gateway.shared.certificate import Certificate, Contents, authorities_in
from gateway.shared.files import checked
from gateway.shared.files.checked import Fault, InvalidFile, Reading, Value, readable
from gateway.shared.files.marks import marked
from gateway.shared.files.modes import refused, unwise
from gateway.shared.tokens import Tokens, expected_in, secrets_in
from gateway.upstream.trust import Trust

Read = Callable[[Path], bytes]

CLOSED = "a file that others may not change"
NO_PYJWT = "auth needs PyJWT, which is not installed here: pip install 'WEIR.whl[jwt]'"
NO_PYZMQ = "pyzmq, which is not installed here: pip install 'WEIR.whl[kv-events]', or leave kv_events out"


class ClusterFiles(msgspec.Struct, frozen=True):
    """The secrets of a cluster's member. `trust` and `certificate`: of TLS between members; None: there is none.
    `contents`: of the certificate's files."""

    tokens: Tokens
    password: str | None
    trust: Trust | None
    certificate: Certificate | None
    contents: Contents = {}


class Configuration(msgspec.Struct, frozen=True):
    """A policy and its secrets.

    `policy`: with the keys of its keys file among its tenants'. `api_keys`: the engines' own API keys by URL, and the
    providers' by name.
    `sidecar_tokens`: of which sidecars must show one; empty: not given. `order_tokens`: of which sidecars are shown the
    first; empty: the same. `sidecar_trust`: in their certificates; None: no matter of the policy. `cache_secret`: the
    secret of the cache salts; None: drawn at each start. `cluster`: the secrets of its cluster; None: it is of none.
    `jwks`: the content of `auth.jwks`, a file. `tree`: the parsed policy file, for line numbers.
    """

    policy: Policy = Policy()
    api_keys: Mapping[str, str] = {}
    sidecar_tokens: Tokens = ()
    order_tokens: Tokens = ()
    sidecar_trust: Trust | None = None
    cache_secret: str | None = None
    cluster: ClusterFiles | None = None
    jwks: bytes = b""
    tree: Value | None = None

    @property
    def orders_by(self) -> str | None:
        """Token that this gateway shows sidecars."""
        return next(iter(self.order_tokens or self.sidecar_tokens), None)


class LoadError(Exception):
    """A required file, named outside of the policy, cannot be used. The message gives the file and the reason."""


def load(path: Path, read: Read, *, files: bool = True) -> Configuration:
    """The configuration of a policy file. With `files` False the files that it names are not read.

    Raises InvalidFile with every problem, also of the files that it names, and OSError for the policy file itself. A
    file that could not be read is the error's cause, since that may pass.
    """
    reading = read_policy(read(path), str(path))
    named = Named(path, read)
    if files:
        reading.judge(named.faults(reading))
    problems = [*reading.problems, *named.problems]
    if problems:
        raise InvalidFile(problems) from named.failure
    policy, secrets = named.policy or reading.value, named.secrets
    one = {at: words[0] for at, words in secrets.items()}
    keys: dict[str, checked.Path] = {name: ("providers", name, "key_file") for name in policy.providers}
    for index, engine in enumerate(policy.fleet.engines):
        keys[engine.url] = ("fleet", "engines", index, "api_key_file")
    tokens, password = secrets.get(("cluster", "token_file"), ()), one.get(("cluster", "password_file"))
    return Configuration(
        policy,
        api_keys={owner: one[at] for owner, at in keys.items() if at in one},
        sidecar_tokens=secrets.get(("fleet", "sidecars", "token_file"), ()),
        order_tokens=secrets.get(("fleet", "sidecars", "order_token_file"), ()),
        sidecar_trust=named.sidecar_trust,
        cache_secret=one.get(("routing", "cache_secret_file")),
        cluster=ClusterFiles(tokens, password, named.member_trust, *named.certificate) if tokens else None,
        jwks=named.jwks,
        tree=reading.root,
    )


class Named:
    """The files that a policy names, as they are read."""

    def __init__(self, path: Path, read: Read) -> None:
        self.secrets: dict[checked.Path, Tokens] = {}  # by the field that names the file
        self.sidecar_trust: Trust | None = None
        self.member_trust: Trust | None = None
        self.certificate: tuple[Certificate | None, Contents] = (None, {})
        self.jwks = b""
        self.policy: Policy | None = None  # with the keys of its keys file
        self.problems: list[checked.Problem] = []  # in other files
        self.failure: OSError | None = None
        self._path = path
        self._read = read

    def faults(self, reading: Reading[Policy]) -> Iterator[Fault]:
        """The faults of the files, each at the policy's field that names the file."""
        policy = reading.value
        yield from readable(
            self._secrets(reading),
            self._providers(policy),
            self._events(policy),
            self._trust(policy),
            self._cluster(policy),
            self._auth(policy),
            self._keys(policy),
        )

    def _secrets(self, reading: Reading[Policy]) -> Iterator[Fault]:
        """Read the words of each secret file."""
        for at, name, mark in marked(reading.value, Secret, reading.structs):
            self.secrets[at] = yield from self._secret(name, at, mark)

    def _events(self, policy: Policy) -> Iterator[Fault]:
        for index, engine in enumerate(policy.fleet.engines):
            if engine.kv_events is not None and importlib.util.find_spec("zmq") is None:
                yield Fault(("fleet", "engines", index, "kv_events"), engine.kv_events, NO_PYZMQ)

    def _providers(self, policy: Policy) -> Iterator[Fault]:
        for name, provider in policy.providers.items():
            file = self._path.parent / provider.key_file
            wrong = unwise(file)
            if wrong is not None and refused(file) is None:
                yield Fault(("providers", name, "key_file"), f"{file}: {wrong}", "a file that others may not read")

    def _trust(self, policy: Policy) -> Iterator[Fault]:
        """Read the authorities of the sidecars' certificates."""
        tls = None if policy.fleet.sidecars is None else policy.fleet.sidecars.tls
        if tls is not None:
            ca = yield from self._authorities(tls.ca_file, ("fleet", "sidecars", "tls", "ca_file"))
            self.sidecar_trust = Trust(ca=ca, name=tls.name)

    def _authorities(self, name: str | None, at: checked.Path) -> Generator[Fault, None, str | None]:
        """The certificates in a file; None: there is no file, or a fault in it."""
        if name is None:
            return None
        file, expected = self._path.parent / name, "a file of certificates, in PEM"
        try:
            ca = authorities_in(self._read(file))
            Trust(ca=ca).context()
        except ssl.SSLError as error:
            yield Fault(at, f"{file}: {error.reason or error}", expected)
        except OSError as error:
            self.failure = self.failure or error
            yield Fault(at, f"{file}: {error.strerror or error}", expected)
        else:
            return ca
        return None

    def _cluster(self, policy: Policy) -> Iterator[Fault]:
        """Read the certificates of this member, and the authorities of the others'."""
        tls, folder = None if policy.cluster is None else policy.cluster.tls, self._path.parent
        if tls is None:
            return
        ca = yield from self._authorities(tls.ca_file, ("cluster", "tls", "ca_file"))
        self.member_trust = Trust(ca=ca, name=tls.name)
        key = None if tls.key_file is None else folder / tls.key_file
        certificate = Certificate(folder / tls.cert_file, key)
        try:
            self.certificate = certificate, certificate.loaded(self._read)[1]
        except (OSError, ValueError) as error:
            yield Fault(("cluster", "tls", "cert_file"), str(error), "a certificate, in PEM, and its key")

    def _auth(self, policy: Policy) -> Iterator[Fault]:
        """The issuer's keys, where a file has them."""
        auth = policy.auth
        if auth is not None and importlib.util.find_spec("jwt") is None:
            yield Fault(("auth",), NO_PYJWT, "PyJWT, or no auth")
        elif auth is not None and auth.jwks_url is None:
            from gateway.core.policy.signed_token import KeySet  # noqa: PLC0415 # PyJWT is an extra

            file, at, expected = self._path.parent / auth.jwks, ("auth", "jwks"), "the issuer's JWK Set"
            try:
                self.jwks, wrong = self._read(file), refused(file)
                KeySet(self.jwks)
            except OSError as error:
                self.failure = self.failure or error
                yield Fault(at, f"{file}: {error.strerror or error}", expected)
            except ValueError as error:
                yield Fault(at, f"{file}: {error}", expected)
            else:
                if wrong is not None:
                    yield Fault(at, f"{file}: {wrong}", CLOSED)

    def _secret(self, name: str, at: checked.Path, mark: Secret) -> Generator[Fault, None, Tokens]:
        """The words in a file."""
        file = self._path.parent / name
        expected = f"a file with {expected_in(mark.kind, mark.least, mark.most)}"
        try:
            words, wrong = secrets_in(self._read(file), mark.least, mark.most), refused(file)
        except OSError as error:
            self.failure = self.failure or error
            expected += "; variables are not replaced by their values" if "$" in name else ""
            yield Fault(at, f"{file}: {error.strerror or error}", expected)
            return ()
        if wrong is not None:
            yield Fault(at, f"{file}: {wrong}", CLOSED)
        elif not words:
            yield Fault(at, f"something else in {file}", expected)
        return words

    def _keys(self, policy: Policy) -> Iterator[Fault]:
        """Read the keys file. A missing file has no keys, so nobody is let in by it; `gateway key add` creates it."""
        if policy.keys_file is None:
            return
        file = self._path.parent / policy.keys_file
        try:
            data, wrong = self._read(file), refused(file)
            if wrong is not None:
                yield Fault(("keys_file",), f"{file}: {wrong}", CLOSED)
            self.policy = with_keys(policy, keys_from(data, str(file)), str(file))
        except FileNotFoundError:
            return
        except OSError as error:
            self.failure = self.failure or error
            yield Fault(("keys_file",), f"{file}: {error.strerror or error}", "a file of keys, which gateway key makes")
        except InvalidFile as error:
            self.problems += error.problems
