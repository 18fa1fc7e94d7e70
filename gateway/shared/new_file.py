"""Creation of a file that was not there: never over another file, nor through a link."""

from __future__ import annotations

import os
from pathlib import Path


def write_new(path: Path, text: str, mode: int = 0o666) -> None:
    """Create the file with this text. `mode`: its permissions before the umask, 0o600 for a secret. Raises OSError,
    FileExistsError where the path is taken."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)


def not_written(path: Path, error: OSError) -> str:
    """A sentence for the person whose command named the path with `--out`."""
    if isinstance(error, FileExistsError):
        return f"{path} is there already and is left as it is; give another name: --out FILE"
    return f"{path}: {error.strerror}"
