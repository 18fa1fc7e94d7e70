"""Models that sidecars had, remembered over a restart in a small file: calls for them wait until sidecars report again.

Names alone are remembered, and no engine: whether one is awake, only its sidecar knows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from gateway.core.sidecars.model_index import MOST_MODELS

MOST_BYTES = 16 * 1024**2


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    models: list[str]


def file_for(policy: Path) -> Path:
    """The file of the gateway with this policy: in the service's own folder, else beside the policy."""
    given = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    return (Path(given) if given else policy.parent) / f"{policy.stem}.models.json"


class KnownModels:
    """The names in `file`. `say` takes a line for the operator, once, where it cannot be used."""

    def __init__(self, file: Path, say: Callable[[str], None]) -> None:
        self._file = file
        self._say = say
        self._said = False
        self._kept: frozenset[str] | None = None  # what is in the file

    def read(self) -> frozenset[str]:
        """The names that are remembered; none, where there is no such file."""
        try:
            with self._file.open("rb") as opened:
                found = msgspec.json.decode(opened.read(MOST_BYTES), type=_File)
        except FileNotFoundError:
            return frozenset()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._tell(f"{self._file}: {error}: no model is remembered")
            return frozenset()
        return frozenset(found.models[:MOST_MODELS]) if found.version == 1 else frozenset()

    def keep(self, names: frozenset[str]) -> None:
        """Have these remembered."""
        if names == self._kept:
            return
        self._kept = names
        new = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        try:
            with open(new, "wb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600)) as opened:
                opened.write(msgspec.json.encode(_File(1, sorted(names))))
            new.replace(self._file)
        except OSError as error:
            self._tell(f"{self._file} cannot be written ({error.strerror}): a restart forgets the models of sidecars")

    def _tell(self, line: str) -> None:
        if not self._said:
            self._said = True
            self._say(line)
