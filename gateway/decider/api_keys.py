"""API keys made and revoked while the gateway runs, in the policy's keys file, as `gateway key` does it.

The file is the one place where keys are: what is changed here outlives the process, and is in force once the policy
has been read again, which is waited for. A key itself is in no log and is kept nowhere: the file has its hash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from gateway.core.policy.policy import Policy
from gateway.decider.key_file import SHOWN, KeysError, add, digest_of, entries, revoke
from gateway.shared.files.file_status import FileStatus


class KeyChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The key whose SHA-256 begins with `hash` was made or revoked. `key`: itself, where it was made. `problem`: why
    the change is not in force yet, empty: it is."""

    tenant: str
    hash: str
    key: str = ""
    problem: str = ""


class ApiKeys:
    """Keys of one policy file. `policy` gives the one in force, `reload` has its files read again."""

    def __init__(
        self,
        policy_file: Path,
        policy: Callable[[], Policy],
        reload: Callable[[], Awaitable[FileStatus]],
        say: Callable[[str], None],
    ) -> None:
        self._policy_file = policy_file
        self._policy = policy
        self._reload = reload
        self._say = say
        self._one = asyncio.Lock()  # a thread for one change at a time

    async def make(self, tenant: str) -> KeyChange:
        """A new key. Raises LookupError for a tenant that is not there, KeysError and InvalidFile for a file that
        cannot be changed."""
        file = self._file(tenant)
        async with self._one:
            key = await asyncio.to_thread(add, file, tenant, datetime.now(UTC).date().isoformat())
            digest = digest_of(key)[:SHOWN]
            self._say(f"keys: a key of {tenant} was made on the control port: {digest}")
            return KeyChange(tenant=tenant, hash=digest, key=key, problem=await self._in_force())

    async def revoke(self, tenant: str, digest: str) -> KeyChange:
        """End the tenant's one key whose hash begins with `digest`. Raises as `make`, LookupError too for a
        key that the tenant does not have in the file."""
        file = self._file(tenant)
        async with self._one:
            found = await asyncio.to_thread(_revoked, file, tenant, digest)
            self._say(f"keys: a key of {tenant} was revoked on the control port: {found}")
            return KeyChange(tenant=tenant, hash=found, problem=await self._in_force())

    def _file(self, tenant: str) -> Path:
        policy = self._policy()
        if tenant not in policy.tenants:
            raise LookupError("The policy has no such tenant.")
        if policy.keys_file is None:
            raise KeysError("The policy names no file for keys: add a line such as `keys_file: keys.txt` to it.")
        return self._policy_file.parent / policy.keys_file

    async def _in_force(self) -> str:
        status = await self._reload()
        return "" if status.error is None else f"The policy's files cannot be used now:\n{status.error}"


def _revoked(file: Path, tenant: str, digest: str) -> str:
    """The beginning of the hash of the key that was revoked."""
    if not any(entry.tenant == tenant and entry.digest.startswith(digest) for entry in entries(file)):
        raise LookupError(
            f"{tenant} has no key {digest[:SHOWN]} in {file.name}. One that is in the policy itself is revoked there."
        )
    return revoke(file, digest).digest[:SHOWN]
