"""Listing of a model's files at a source: names, sizes and checksums, read strictly. No I/O.

Whoever keeps a source may lie in it. A name that would lead out of the model's folder, a size that cannot be and a list
that is too long refuse the whole listing.
"""

from __future__ import annotations

import fnmatch
import html
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal
from urllib.parse import unquote, urljoin, urlsplit

import msgspec

MAX_FILES = 10_000
MAX_SIZE = 2**46  # bytes of one file, 64 TiB
MAX_LISTING = 32 * 1024 * 1024  # bytes of what a server answers for a list
SUMS = "SHA256SUMS"  # a list of checksums as sha256sum writes it
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
REVISION = re.compile(r"[A-Za-z0-9][\w.-]{0,127}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SEGMENT, _NAME, _DEEPEST = 255, 1000, 8  # bytes of a part of a name, of a name; parts of a name

_VALUE = r"""\"[^\"<>]{1,2000}\"|'[^'<>]{1,2000}'|[^\s\"'<>]{1,2000}"""
_LINK = re.compile(rf"<a\s[^<>]{{0,1000}}?\bhref\s{{0,9}}=\s{{0,9}}({_VALUE})", re.IGNORECASE)

# Weights that vLLM does not load.
_FOREIGN = (".h5", ".msgpack", ".onnx", ".ot", ".tflite", ".ckpt", ".mlmodel")
_OLDER = (".bin", ".pt", ".pth")  # not loaded where there are .safetensors
_WEIGHTS = (".safetensors", ".gguf", *_OLDER, *_FOREIGN)


class BadListing(Exception):
    """A listing that cannot be trusted or is none; the message says why."""


class Digest(msgspec.Struct, frozen=True):
    """A checksum in hexadecimal: SHA-256 of the file, or Git's SHA-1 of it as a blob."""

    kind: Literal["sha256", "git"]
    value: str


class SourceFile(msgspec.Struct, frozen=True, kw_only=True):
    """File of a source. `size` in bytes. `version`: any text that changes with its content, empty if unknown."""

    name: str
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]
    digest: Digest | None = None
    version: str = ""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a model at one source. `commit`: of a hub's model, else empty."""

    source: str
    files: tuple[SourceFile, ...]
    commit: str = ""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def checked_name(name: str) -> str:
    """`name`, if it is a relative path that stays below its folder, wherever it is written. Raises BadListing."""
    parts = name.split("/")
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        raise BadListing(f"it names a file {name!r}, which is no text") from None
    bad = (
        any(part in ("", ".", "..") for part in parts)
        or any(not character.isprintable() or character == "\\" for character in name)
        or max(sizes) > _SEGMENT
        or sum(sizes) > _NAME
        or len(parts) > _DEEPEST
    )
    if bad:
        raise BadListing(f"it names a file {name[:200]!r}, which is no name for a file below the model's folder")
    return name


def checked(files: Iterable[SourceFile]) -> tuple[SourceFile, ...]:
    """The files, if each has a name of its own that no other needs as its folder. Raises BadListing."""
    found = tuple(files)
    names = {checked_name(file.name) for file in found}
    if len(found) > MAX_FILES:
        raise BadListing(f"it lists more than {MAX_FILES} files")
    if len(names) < len(found):
        raise BadListing("it lists a file twice")
    for name in names:
        folders = name.split("/")[:-1]
        if any("/".join(folders[: depth + 1]) in names for depth in range(len(folders))):
            raise BadListing(f"it lists {name[:200]!r} below a file")
    return found


def chosen(names: Sequence[str], only: Sequence[str] = (), *, everything: bool = False) -> list[str]:
    """The names of the files that vLLM reads: not a model's other formats, nor copies of its weights in subfolders.
    `only`: of the weights those that match one of these patterns. `everything`: all but hidden ones."""
    seen = [name for name in names if not any(part.startswith(".") for part in name.split("/")) and name != SUMS]
    if everything:
        return seen
    weights = [name for name in seen if name.endswith(_WEIGHTS)]
    if only:
        kept = {name for name in weights if any(fnmatch.fnmatchcase(name, pattern) for pattern in only)}
    else:
        kept = {name for name in weights if not name.endswith(_FOREIGN)}
        safe = {name for name in kept if name.endswith(".safetensors") and "/" not in name}
        if safe:
            kept = {name for name in safe if not name.startswith("consolidated")} or safe
    return [name for name in seen if name in kept or name not in weights]


# -- what servers answer ----------------------------------------------------------------------------------------------


class _Lfs(msgspec.Struct):
    sha256: str
    size: int


class _Sibling(msgspec.Struct):
    rfilename: str
    size: int | None = None
    blobId: str | None = None  # noqa: N815 # the hub's own name
    lfs: _Lfs | None = None


class _HubModel(msgspec.Struct):
    sha: str
    siblings: list[_Sibling]


class Unsized(msgspec.Struct, frozen=True):
    """A file of which the listing may not know the size."""

    name: str
    size: int | None
    digest: Digest | None


def hub_files(body: bytes) -> tuple[str, list[Unsized]]:
    """The commit and the files in a hub's answer to `/api/models/ID/revision/REVISION?blobs=true`. Raises
    BadListing."""
    try:
        model = msgspec.json.decode(body, type=_HubModel)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadListing(f"it answers no list of a model's files: {error}") from None
    if _COMMIT.fullmatch(model.sha) is None:
        raise BadListing(f"its commit {model.sha[:80]!r} is none")
    return model.sha, [_hub_file(each) for each in model.siblings[: MAX_FILES + 1]]


def _hub_file(sibling: _Sibling) -> Unsized:
    size = sibling.size if sibling.lfs is None else sibling.lfs.size
    digest = None
    if sibling.lfs is not None:
        digest = digest_of("sha256", sibling.lfs.sha256)
    elif sibling.blobId is not None:
        digest = digest_of("git", sibling.blobId)
    if size is not None and not 0 <= size <= MAX_SIZE:
        raise BadListing(f"it says that {sibling.rfilename[:200]!r} has {size} bytes")
    return Unsized(checked_name(sibling.rfilename), size, digest)


def digest_of(kind: Literal["sha256", "git"], text: str) -> Digest:
    """Raises BadListing for what is none."""
    value = text.lower()
    if re.fullmatch(r"[0-9a-f]{64}" if kind == "sha256" else r"[0-9a-f]{40}", value) is None:
        raise BadListing(f"its checksum {text[:80]!r} is none")
    return Digest(kind, value)


def sums(text: str) -> dict[str, Digest]:
    """Names and checksums in the text of a SHA256SUMS. Raises BadListing."""
    found = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        match = re.fullmatch(r"([0-9A-Fa-f]{64}) [ *](.+)", line)
        if match is None:
            raise BadListing(f"its {SUMS} has a line that is none: {line[:80]!r}")
        found[checked_name(match[2].removeprefix("./"))] = digest_of("sha256", match[1])
        if len(found) > MAX_FILES:
            raise BadListing(f"its {SUMS} lists more than {MAX_FILES} files")
    return found


def links(page: str, url: str) -> Iterator[str]:
    """Names below `url`, which ends in a slash, of what the page of a web server there links to: a folder's ends in a
    slash too. Links that lead elsewhere are passed over. Raises BadListing for a name that is none."""
    base, seen = urlsplit(url), set()
    for match in _LINK.finditer(page):
        link = html.unescape(match[1].strip("\"'"))
        try:
            target = urlsplit(urljoin(url, link))
        except ValueError:
            continue
        here = (target.scheme, target.netloc) == (base.scheme, base.netloc) and target.path.startswith(base.path)
        rest = target.path[len(base.path) :]
        if not here or not rest or target.query or rest in seen:
            continue
        seen.add(rest)
        name = unquote(rest)
        yield f"{checked_name(name.removesuffix('/'))}{'/' if name.endswith('/') else ''}"
