"""Exclusive lock (flock) of a folder. The kernel frees it at the end of the process that has it, however that ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FolderLock:
    """The lock of one folder, for one process. Nothing of it waits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor = -1  # the folder's, while it is locked

    def take(self) -> bool:
        """Lock the folder, which stays so until `leave`; False: another process has the lock. Raises OSError."""
        if self._descriptor < 0:
            descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                if isinstance(error, BlockingIOError):
                    return False
                raise
            self._descriptor = descriptor
        return True

    def leave(self) -> None:
        """Let another process take it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
