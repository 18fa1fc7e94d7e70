"""Permissions of secret files: refuses or reports files that other users may read or change.

A file that everybody may write is refused: whoever changes it can add keys or tokens. A file that everybody may read,
or that its group may write, is only reported, since some places (volumes of containers) do not allow better.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from gateway.core.policy.policy import Policy
from gateway.shared.files.checked import Path as FieldPath


def refused(file: Path) -> str | None:
    """The reason why a secret file is refused for its mode; None: it is not. Raises OSError where its status cannot be
    read.
    """
    mode = os.stat(file).st_mode
    if stat.S_ISREG(mode) and mode & stat.S_IWOTH:
        return f"everybody on this machine may write to it: chmod o-w {file}"
    return None


def unwise(file: Path, *, readable: bool = False) -> str | None:
    """Advice on a file's mode; None: there is none, or no such file, which others report. `readable`: others may read
    it, since it holds hashes only.
    """
    try:
        mode = os.stat(file).st_mode
    except OSError:
        return None
    if not stat.S_ISREG(mode):  # a pipe, as shells make for <(command)
        return None
    if mode & stat.S_IWGRP:
        return f"its group may write to it: chmod g-w {file}"
    if mode & stat.S_IROTH and not readable:
        return f"everybody on this machine may read it: chmod o-r {file}"
    return None


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
    if policy.routing.cache_secret_file is not None:
        yield ("routing", "cache_secret_file"), folder / policy.routing.cache_secret_file, False


def unwise_of(policy: Policy, folder: Path) -> list[tuple[FieldPath, str]]:
    """Advice on the modes of a policy's files, each with its field."""
    found = ((path, unwise(file, readable=readable)) for path, file, readable in files_of(policy, folder))
    return [(path, text) for path, text in found if text is not None]
