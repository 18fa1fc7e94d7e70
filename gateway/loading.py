"""From files to what a gateway is run with: the policy, and the secrets it names, none of which are in the policy.

File names in a policy are relative to its own folder. `read` is how files are read, so that whoever watches them knows
which they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from gateway.core.policy import Policy
from gateway.core.policy_file import decode
from gateway.core.tenants import keys_from, with_keys
from gateway.file_modes import refused
from gateway.wire.client import parse_origin

Read = Callable[[Path], bytes]

TOKEN_LENGTH = 16  # characters, at least; as the control port's token
MAX_SECRET = 4096  # bytes


class Configuration(msgspec.Struct, frozen=True):
    """A policy with the keys of its keys file among its tenants', the engines' own API keys by their URL, what sidecars
    have to show, if anything, and what cache salts are made with; null: drawn at each start."""

    policy: Policy = Policy()
    api_keys: Mapping[str, str] = {}
    sidecar_token: str | None = None
    cache_secret: str | None = None


class LoadError(Exception):
    """A file that the policy names cannot be used; the message says which, and why."""


def load(path: Path, read: Read) -> Configuration:
    """The configuration a policy file describes. Raises InvalidFile, LoadError, and OSError for the policy itself."""
    policy = decode(read(path), str(path))
    if policy.keys_file is not None:
        file = (
            path.parent / policy.keys_file
        )  # that is not there yet: nobody is let in by it, and `gateway key add` makes it
        policy = with_keys(policy, keys_from(_read(read, file, "keys_file", needed=False), str(file)), str(file))
    keys = {}
    for index, engine in enumerate(policy.fleet.engines):
        where = f"{path}: fleet.engines[{index}]"
        try:
            parse_origin(engine.url)
        except ValueError as error:
            raise LoadError(f"{where}.url: {error}") from error
        if engine.api_key_file is not None:
            keys[engine.url] = secret(read, path.parent / engine.api_key_file, f"{where}.api_key_file", "key")
    sidecars, token = policy.fleet.sidecars, None
    if sidecars is not None and sidecars.token_file is not None:
        where = f"{path}: fleet.sidecars.token_file"
        token = secret(read, path.parent / sidecars.token_file, where, "token", TOKEN_LENGTH)
    cache_secret = None
    if policy.routing.cache_secret_file is not None:
        where = f"{path}: routing.cache_secret_file"
        cache_secret = secret(read, path.parent / policy.routing.cache_secret_file, where, "secret", TOKEN_LENGTH)
    return Configuration(policy, keys, token, cache_secret)


def _read(read: Read, path: Path, what: str, *, needed: bool = True) -> bytes:
    """A file of secrets. One that is not there is empty where it is not `needed`."""
    try:
        data = read(path)
        wrong = refused(path)
    except FileNotFoundError as error:
        if not needed:
            return b""
        raise LoadError(f"{what}: {path}: {error.strerror}") from error
    except OSError as error:
        raise LoadError(f"{what}: {path}: {error.strerror or error}") from error
    if wrong is not None:
        raise LoadError(f"{what}: {path}: {wrong}")
    return data


def secret(read: Read, path: Path, what: str, kind: str, least: int = 1) -> str:
    """The one word in a file."""
    secret = _read(read, path, what)
    secret = secret.strip() if len(secret) <= MAX_SECRET else b""
    if not secret.isascii() or not secret.decode().isprintable() or b" " in secret or len(secret) < least:
        length = f" at least {least}" if least > 1 else ""
        raise LoadError(f"{what}: {path}: expected one {kind} of{length} visible ASCII characters")
    return secret.decode()
