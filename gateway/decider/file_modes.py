"""Secret files and the storage that a policy names, and advice on their permissions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gateway.core.policy.policy import Policy
from gateway.shared.files.checked import Path as FieldPath
from gateway.shared.files.modes import unwise, unwise_folder


def files_of(policy: Policy, folder: Path) -> Iterator[tuple[FieldPath, Path, bool]]:
    """The secret files that a policy names: field, file, and whether others may read it."""
    if policy.keys_file is not None:
        yield ("keys_file",), folder / policy.keys_file, True
    for index, engine in enumerate(policy.fleet.engines):
        if engine.api_key_file is not None:
            yield ("fleet", "engines", index, "api_key_file"), folder / engine.api_key_file, False
    sidecars = policy.fleet.sidecars
    if sidecars is not None and sidecars.token_file is not None:
        yield ("fleet", "sidecars", "token_file"), folder / sidecars.token_file, False
    if sidecars is not None and sidecars.order_token_file is not None:
        yield ("fleet", "sidecars", "order_token_file"), folder / sidecars.order_token_file, False
    if policy.routing.cache_secret_file is not None:
        yield ("routing", "cache_secret_file"), folder / policy.routing.cache_secret_file, False


def unwise_of(policy: Policy, folder: Path) -> list[tuple[FieldPath, str]]:
    """Advice on the modes of a policy's files and of its storage, each with its field."""
    found = ((path, unwise(file, readable=readable)) for path, file, readable in files_of(policy, folder))
    advice = [(path, text) for path, text in found if text is not None]
    if policy.storage is not None:
        text = unwise_folder(folder / policy.storage.folder)
        advice += [] if text is None else [(("storage", "folder"), text)]
    return advice
