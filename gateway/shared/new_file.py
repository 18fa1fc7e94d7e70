"""Creation of a file that was not there: never over another file, nor through a link. And a file's move to its name."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.shared.command_line import Mistake


def write_new(path: Path, text: str, mode: int = 0o666) -> None:
    """Create the file with this text. `mode`: its permissions before the umask, 0o600 for a secret. Raises OSError,
    FileExistsError where the path is taken."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)


def move(file: Path, path: Path) -> None:
    """Give a file whose content is on the disk the name `path`, which stays also where the power fails. Raises
    OSError."""
    os.replace(file, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_out(path: Path, text: str, mode: int = 0o666) -> None:
    """Write the file that a command was given with `--out`, where there is none. Raises Mistake."""
    try:
        write_new(path, text, mode)
    except FileExistsError as error:
        message = f"{path} is there already and is left as it is; give another name: --out FILE"
        raise Mistake(message) from error
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}") from error
