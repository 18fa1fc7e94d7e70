"""Secret files and the storage that a policy names: advice on their permissions, and a storage that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gateway.core.policy.policy import Policy
from gateway.shared.files.checked import Path as FieldPath
from gateway.shared.files.modes import refused_folder, unwise, unwise_folder

STORAGE: FieldPath = ("storage",)


def files_of(policy: Policy, folder: Path) -> Iterator[tuple[FieldPath, Path]]:
    """The secret files that a policy names, each with its field. The keys file has hashes, and who has which key."""
    if policy.keys_file is not None:
        yield ("keys_file",), folder / policy.keys_file
    for index, engine in enumerate(policy.fleet.engines):
        if engine.api_key_file is not None:
            yield ("fleet", "engines", index, "api_key_file"), folder / engine.api_key_file
    sidecars = policy.fleet.sidecars
    if sidecars is not None and sidecars.token_file is not None:
        yield ("fleet", "sidecars", "token_file"), folder / sidecars.token_file
    if sidecars is not None and sidecars.order_token_file is not None:
        yield ("fleet", "sidecars", "order_token_file"), folder / sidecars.order_token_file
    if policy.routing.cache_secret_file is not None:
        yield ("routing", "cache_secret_file"), folder / policy.routing.cache_secret_file


def unwise_of(policy: Policy, folder: Path) -> list[tuple[FieldPath, str]]:
    """Advice on the modes of a policy's files and of its storage, each with its field."""
    found = [(path, unwise(file)) for path, file in files_of(policy, folder)]
    if policy.storage is not None:
        found.append((STORAGE, unwise_folder(folder / policy.storage)))
    return [(path, text) for path, text in found if text is not None]


def unusable_of(policy: Policy, folder: Path) -> list[tuple[FieldPath, str]]:
    """Reasons why a gateway with this policy would not start, each with its field."""
    text = None if policy.storage is None else refused_folder(folder / policy.storage)
    return [] if text is None else [(STORAGE, text)]
