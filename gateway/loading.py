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
from gateway.wire.client import parse_origin

Read = Callable[[Path], bytes]


class Configuration(msgspec.Struct, frozen=True):
    """A policy with the keys of its keys file among its tenants', and the engines' own API keys by their URL."""

    policy: Policy = Policy()
    api_keys: Mapping[str, str] = {}


class LoadError(Exception):
    """A file that the policy names cannot be used; the message says which, and why."""


def load(path: Path, read: Read) -> Configuration:
    """The configuration a policy file describes. Raises InvalidFile, LoadError, and OSError for the policy itself."""
    policy = decode(read(path), str(path))
    if policy.keys_file is not None:
        file = path.parent / policy.keys_file
        policy = with_keys(policy, keys_from(_keys(read, file), str(file)), str(file))
    keys = {}
    for index, engine in enumerate(policy.fleet.engines):
        where = f"{path}: fleet.engines[{index}]"
        try:
            parse_origin(engine.url)
        except ValueError as error:
            raise LoadError(f"{where}.url: {error}") from error
        if engine.api_key_file is not None:
            keys[engine.url] = _api_key(read, path.parent / engine.api_key_file, f"{where}.api_key_file")
    return Configuration(policy, keys)


def _read(read: Read, path: Path, what: str) -> bytes:
    try:
        return read(path)
    except OSError as error:
        raise LoadError(f"{what}: {path}: {error.strerror or error}") from error


def _keys(read: Read, path: Path) -> bytes:
    """A keys file that is not there yet has no keys: nobody is let in by it, and `gateway key add` makes it."""
    try:
        return read(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise LoadError(f"keys_file: {path}: {error.strerror or error}") from error


def _api_key(read: Read, path: Path, what: str) -> str:
    key = _read(read, path, what).strip()
    if not key or not key.isascii() or not key.decode().isprintable() or b" " in key:
        raise LoadError(f"{what}: {path}: expected one key of visible ASCII characters")
    return key.decode()
