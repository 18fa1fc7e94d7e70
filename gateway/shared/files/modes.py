"""Permissions of secret files: refuses or reports files that other users may read or change.

A file that everybody may write is refused: whoever changes it can add keys or tokens. A file that everybody may read,
or that its group may write, is only reported, since some places (volumes of containers) do not allow better.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def refused(file: Path) -> str | None:
    """The reason why a secret file is refused for its mode; None: it is not. Raises OSError where its status cannot be
    read.
    """
    mode = os.stat(file).st_mode
    if stat.S_ISREG(mode) and mode & stat.S_IWOTH:
        return f"everybody on this machine may write to it: chmod o-w {file}"
    return None


def refused_folder(folder: Path) -> str | None:
    """The reason why a folder cannot be written into, and be made where it is not there; None: it can."""
    try:
        mode = os.stat(folder).st_mode
    except FileNotFoundError:
        above = folder.parent
        if not above.is_dir():
            return f"it cannot be made: {above} is not there, or is no folder"
        return None if os.access(above, os.W_OK | os.X_OK) else f"it cannot be made: this user may not write in {above}"
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return None if stat.S_ISDIR(mode) else f"it is no folder: {folder}"


def unwise_folder(folder: Path) -> str | None:
    """Advice on the mode of a folder that a gateway writes into; None: there is none. A volume's own folder is often
    everybody's, so that is only reported."""
    try:
        mode = os.stat(folder).st_mode
    except OSError:
        return None
    if mode & stat.S_IWOTH:
        return f"everybody on this machine may write there: chmod o-w {folder}, or name a folder in it"
    return None


def unwise(file: Path) -> str | None:
    """Advice on a secret file's mode; None: there is none, or no such file, which others report."""
    try:
        mode = os.stat(file).st_mode
    except OSError:
        return None
    if not stat.S_ISREG(mode):  # a pipe, as shells make for <(command)
        return None
    if mode & stat.S_IWGRP:
        return f"its group may write to it: chmod g-w {file}"
    if mode & stat.S_IROTH:
        return f"everybody on this machine may read it: chmod o-r {file}"
    return None
