"""Listing of a model's files at a source: names, sizes and checksums, read strictly. No I/O.

A source may lie. A name that leads out of the model's folder refuses the whole listing.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import Annotated, TypeAlias

import msgspec

MAX_FILES = 4096
MAX_SIZE = 2**46  # bytes of one file, 64 TiB
SUMS = "SHA256SUMS"  # a list of checksums as sha256sum writes it
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
REVISION = re.compile(r"[A-Za-z0-9][\w.-]{0,127}", re.ASCII)
_SUM = re.compile(r"([0-9A-Fa-f]{64}) [ *](?:\./)?(.+)")

# Weights that vLLM does not load.
_FOREIGN = (".h5", ".msgpack", ".onnx", ".ot", ".tflite", ".ckpt", ".mlmodel")
_OLDER = (".bin", ".pt", ".pth")  # not loaded where there are .safetensors
_WEIGHTS = (".safetensors", ".gguf", *_OLDER, *_FOREIGN)


Select: TypeAlias = Callable[[Sequence[str]], list[str]]  # of a source's files those that are wanted


class PullError(Exception):
    """A model's files that cannot be fetched; the message says why and what to do."""


class SourceFile(msgspec.Struct, frozen=True, kw_only=True):
    """File of a source."""

    name: str
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]  # bytes
    sha256: str = ""  # in hexadecimal; empty: unknown
    version: str = ""  # changes with the content; empty: unknown


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a model at one source."""

    source: str
    files: tuple[SourceFile, ...]
    commit: str = ""  # of a hub's model

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def check_names(names: Sequence[str]) -> None:
    """Raise PullError unless each name is a relative path below the model's folder, and no file is another's folder."""
    if len(names) > MAX_FILES:
        raise PullError(f"the source lists more than {MAX_FILES} files: it is no model's folder")
    if len(set(names)) < len(names):
        raise PullError("the source lists a file twice")
    for name in names:
        parts = name.split("/")
        if any(part in ("", ".", "..") for part in parts) or not name.isprintable() or "\\" in name:
            raise PullError(f"the source lists {name[:200]!r}, which is no name for a file below the model's folder")
        if any("/".join(parts[:depth]) in names for depth in range(1, len(parts))):
            raise PullError(f"the source lists {name[:200]!r} below a file")


def select(names: Sequence[str], only: Sequence[str] = (), *, everything: bool = False) -> list[str]:
    """Select the files that vLLM reads: not a model's other formats, nor copies of its weights in subfolders.
    `only`: of the weights those that match one of these patterns. `everything`: all but hidden ones."""
    seen = [name for name in names if "/." not in f"/{name}" and name != SUMS]
    if everything:
        return seen
    weights = [name for name in seen if name.endswith(_WEIGHTS)]
    if only:
        selected = {name for name in weights if any(fnmatch.fnmatchcase(name, pattern) for pattern in only)}
    else:
        selected = {name for name in weights if not name.endswith(_FOREIGN)}
        safe = {name for name in selected if name.endswith(".safetensors") and "/" not in name}
        if safe:
            selected = {name for name in safe if not name.startswith("consolidated")} or safe
    return [name for name in seen if name in selected or name not in weights]


def checksums(text: str) -> dict[str, str]:
    """SHA-256 by name, of the text of a SHA256SUMS. Raises PullError."""
    found = {}
    for line in filter(str.strip, text.splitlines()):
        match = _SUM.fullmatch(line)
        if match is None:
            raise PullError(f"a line of the source's {SUMS} is none: {line[:80]!r}")
        found[match[2]] = match[1].lower()
    return found
