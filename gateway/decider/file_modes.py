"""Secret files and the storage that a policy names: advice on their permissions, and a storage that cannot be used."""

from __future__ import annotations

from pathlib import Path

from gateway.core.policy.policy import Policy
from gateway.core.policy.types import Secret
from gateway.shared.files.checked import Path as FieldPath
from gateway.shared.files.marks import marked
from gateway.shared.files.modes import refused_folder, unwise, unwise_folder

STORAGE: FieldPath = ("storage",)


def unwise_of(policy: Policy, folder: Path) -> list[tuple[FieldPath, str]]:
    """Advice on the modes of a policy's files and of its storage, each with its field."""
    files = [(path, name) for path, name, _ in marked(policy, Secret)]
    if policy.keys_file is not None:  # it has hashes, and who has which key
        files.append((("keys_file",), policy.keys_file))
    found = [(path, unwise(folder / name)) for path, name in files]
    if policy.storage is not None:
        found.append((STORAGE, unwise_folder(folder / policy.storage)))
    return [(path, text) for path, text in found if text is not None]


def unusable_of(policy: Policy, folder: Path) -> list[tuple[FieldPath, str]]:
    """Reasons why a gateway with this policy would not start, each with its field."""
    text = None if policy.storage is None else refused_folder(folder / policy.storage)
    return [] if text is None else [(STORAGE, text)]
