"""Active policy, for GET /policy. Secrets are never shown."""

from __future__ import annotations

import msgspec

from gateway.core.policy.file import explain
from gateway.core.policy.policy import Policy
from gateway.shared.files.file_status import FileStatus

DEFAULTS = "the defaults and the command line"
HASH_SHOWN = 8  # digits of a key's SHA-256: enough to tell keys apart


def without_secrets(policy: Policy) -> Policy:
    """The policy with the hashes of keys shortened. Engines' own keys are in files, of which it has only the names."""
    tenants = {
        name: msgspec.structs.replace(tenant, keys=tuple(key[:HASH_SHOWN] for key in tenant.keys))
        for name, tenant in policy.tenants.items()
    }
    return msgspec.structs.replace(policy, tenants=tenants)


def policy_yaml(policy: Policy, status: FileStatus) -> bytes:
    """Every field, with a comment above that says which policy it is and what is wrong with a newer one."""
    lines = [f"version {status.version}, {status.file or f'no file: {status.origin or DEFAULTS}'}"]
    if status.digest:
        lines.append(f"sha256 {status.digest}, loaded at {status.loaded_at}")
    if status.error is not None:
        lines += [f"at {status.error_at} the file could not be used:", *status.error.splitlines()]
    return ("".join(f"# {line}\n" for line in lines) + explain(without_secrets(policy))).encode()
