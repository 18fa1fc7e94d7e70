"""Modes of the files that hold secrets: who else on this machine may read or change them.

A file that everybody may write to is refused: whoever changes it makes keys or tokens for themselves. One that
everybody may read, or a group may write to, is told of, since some places (volumes of containers) cannot do better.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from gateway.core.policy.policy import Policy
from gateway.shared.files.checked import Path as FieldPath


def refused(file: Path) -> str | None:
    """Why a file of secrets is not used; None: its mode is no reason. Raises OSError where it cannot be looked at."""
    mode = os.stat(file).st_mode
    if stat.S_ISREG(mode) and mode & stat.S_IWOTH:
        return f"everybody on this machine may write to it: chmod o-w {file}"
    return None


def unwise(file: Path, *, readable: bool = False) -> str | None:
    """What to reconsider of a file's mode; `readable`: others may read it, as it holds only hashes. None also where
    there is no such file, which is for others to tell."""
    try:
        mode = os.stat(file).st_mode
    except OSError:
        return None
    if not stat.S_ISREG(mode):  # a pipe, as shells make them
        return None
    if mode & stat.S_IWGRP:
        return f"its group may write to it: chmod g-w {file}"
    if mode & stat.S_IROTH and not readable:
        return f"everybody on this machine may read it: chmod o-r {file}"
    return None


def files_of(policy: Policy, folder: Path) -> Iterator[tuple[FieldPath, Path, bool]]:
    """The files of secrets that a policy names: field, file, and whether it may be read by others."""
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
    """What to reconsider of the modes of a policy's files, each with its field."""
    found = ((path, unwise(file, readable=readable)) for path, file, readable in files_of(policy, folder))
    return [(path, text) for path, text in found if text is not None]
