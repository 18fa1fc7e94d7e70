"""Files of a model: its shape and the bytes of its weights, from wherever vLLM would read them.

A model is a folder, a GGUF file, or an id on a hub whose files are in the local Hugging Face cache. Nothing is ever
downloaded. Anybody may have written the files: every read is bounded, only plain files are opened, and links are
followed as the cache is made of them. These functions block; `gateway.shared.threads` is the way to call them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gateway.shared.files.plain_file import open_plain
from sidecar.core.engine_records import Unusable
from sidecar.sizing.model_config import MAX_BYTES, ModelShape, Quantization, shape_from
from sidecar.sizing.model_fields import Malformed, ModelError
from sidecar.sizing.weights import MAX_INDEX, StoredWeights, header_length, index_from, stored_from

MAX_FILES = 4096  # of weights
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
GGUF = b"GGUF"  # how such a file begins
LFS, LFS_MOST = b"version https://git-lfs.github.com/spec/", 1024  # how a pointer of git-lfs begins, and its bytes
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?")
_REVISION = re.compile(r"[A-Za-z0-9][\w.-]{0,127}")
# As vLLM: what a training run leaves beside the weights, and copies of them in another form.
_NOT_WEIGHTS = re.compile(r"(?:training_args|optimizer|scheduler|scaler|rng_state.*|adapter_model)\.\w+")
_PART = re.compile(r"(.+-)\d{5}-of-(\d{5})(\.\w+)")
_INCOMPLETE = "copy or download it again"


class NotKnown(Exception):
    """A model of which no estimate can be made, though vLLM may well run it; the message says why. `stored`: bytes of
    its weights, where they are known all the same."""

    def __init__(self, why: str, stored: int | None = None) -> None:
        super().__init__(why)
        self.stored = stored


class NotHere(NotKnown):
    """A model whose files vLLM downloads when it starts."""


class ModelLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Places of a model's files. `model`: as the profile has it. `folder`: what relative names are relative to.
    `environment`: the engine's. `revision`: of a hub's model. `downloads`: a cache of weights elsewhere. `shape`: the
    folder or id that the config is read from, if not the model's own. `sizes_only`: files of weights need not be
    readable; then their sizes count."""

    model: str
    folder: Path
    environment: Mapping[str, str]
    revision: str = "main"
    downloads: str | None = None
    shape: str | None = None
    sizes_only: bool = False


def read_model(where: ModelLocation) -> tuple[ModelShape, StoredWeights]:
    """Raises Unusable for files that are missing, cut off or unreadable, NotKnown where there are none to look at."""
    if "://" in where.model:
        raise NotKnown(f"{where.model} is not on this machine")
    path = where.folder / where.model
    try:
        if path.is_file():
            return _single(path, where)
        if path.is_dir():
            return _shape(where, path), stored_in(path, sizes_only=where.sizes_only)
        if _HUB_ID.fullmatch(where.model) is None:
            raise Unusable(f"there is no folder or file {path}: correct model_path")
        config = _snapshot(where.model, where.revision, cache_folder(where.environment))
        weights = config
        if where.downloads is not None:
            weights = _snapshot(where.model, where.revision, where.folder / where.downloads)
        if config is None or weights is None:
            raise _absent(where, f"{where.model} is not in the cache")
        return _shape(where, config), _stored_in_cache(weights, where)
    except OSError as error:
        raise Unusable(f"{error.filename or path} cannot be read: {error.strerror}") from error


def cache_folder(environment: Mapping[str, str]) -> Path:
    """The cache folder of huggingface_hub."""
    if given := environment.get("HF_HUB_CACHE"):
        return Path(given)
    if home := environment.get("HF_HOME"):
        return Path(home) / "hub"
    if cache := environment.get("XDG_CACHE_HOME"):
        return Path(cache) / "huggingface" / "hub"
    return Path(environment.get("HOME") or "/nonexistent") / ".cache" / "huggingface" / "hub"


def hub_folder(model: str, cache: Path) -> Path | None:
    """The folder in a cache for a hub's model; None: that is no id of one."""
    return None if _HUB_ID.fullmatch(model) is None else cache / f"models--{model.replace('/', '--')}"


def stored_in(folder: Path, *, sizes_only: bool = False) -> StoredWeights:
    """The weights in a folder: safetensors where there are any, else .bin, else .pt, as vLLM. Raises Unusable where
    there are none or not all, and OSError."""
    names = sorted(name for name in os.listdir(folder)[: 16 * MAX_FILES] if not name.startswith("."))
    if INDEX in names:
        files = list(_parsed(folder / INDEX, _bytes(folder / INDEX, MAX_INDEX)))
    else:
        files = [name for name in names if name.endswith(".safetensors") and not _NOT_WEIGHTS.fullmatch(name)]
        files = [name for name in files if not name.startswith("consolidated")] or files
    for name in files:
        if name not in names:
            raise Unusable(f"{folder / name} is missing, which the index beside it names: {_INCOMPLETE}")
    _whole(folder, files)
    if files:
        parts = [_safetensors(folder / name, sizes_only=sizes_only) for name in files[:MAX_FILES]]
        return StoredWeights(sum(part.bytes for part in parts), sum(part.wide for part in parts))
    for ending in (".bin", ".pt"):
        found = [name for name in names if name.endswith(ending) and not _NOT_WEIGHTS.fullmatch(name)]
        _whole(folder, found)
        if found:
            return StoredWeights(sum(_size(folder / name) for name in found[:MAX_FILES]))
    gguf = next((name for name in names if name.endswith(".gguf")), None)
    advice = f"name one of its files in model_path, such as {gguf}" if gguf else _INCOMPLETE
    raise Unusable(f"{folder} holds no weights (.safetensors, .bin or .pt): {advice}")


def _whole(folder: Path, names: list[str]) -> None:
    """Check that of files that are parts all are there, as their names count them. Raises Unusable."""
    there = set(names)
    series = {match.groups(): name for name in names if (match := _PART.fullmatch(name))}
    for (start, count, ending), name in series.items():
        for number in range(1, min(int(count), MAX_FILES) + 1):
            part = f"{start}{number:05}-of-{count}{ending}"
            if part not in there:
                raise Unusable(f"{folder / part} is missing, which {name} beside it counts: {_INCOMPLETE}")


def _parsed(path: Path, data: bytes) -> tuple[str, ...]:
    try:
        return index_from(data).files
    except ModelError as error:
        raise Unusable(f"{path} cannot be used: {error}") from error


def _safetensors(path: Path, *, sizes_only: bool) -> StoredWeights:
    """The bytes of weights by the header of one file, which has to be as long as that."""
    size = _size(path)
    try:
        length = header_length(_bytes(path, 8, whole=False))
        stored = stored_from(_bytes(path, length, whole=False))
    except ModelError as error:
        if sizes_only:
            return StoredWeights(size)
        raise Unusable(f"{path} cannot be used: {error}") from error
    if size < length + stored.bytes:
        raise Unusable(f"{path} is cut off: it has {size} bytes of {length + stored.bytes}: {_INCOMPLETE}")
    return stored


# -- the shape --------------------------------------------------------------------------------------------------------


def _shape(where: ModelLocation, own: Path) -> ModelShape:
    """From the config that vLLM will read: its own, or that of the folder or id it is told to take it from."""
    found = own
    if where.shape is not None:
        other = where.folder / where.shape
        found = other if other.is_dir() else _snapshot(where.shape, "main", cache_folder(where.environment)) or own
    path = found / CONFIG
    try:
        return shape_from(_bytes(path, MAX_BYTES))
    except FileNotFoundError:
        if (found / "params.json").is_file():
            raise NotKnown(f"{found} has no {CONFIG} but Mistral's params.json") from None
        raise Unusable(f"{path} is missing: {_INCOMPLETE}, or correct model_path") from None
    except Malformed as error:
        raise Unusable(f"{path}: {error}: {_INCOMPLETE}, or correct it") from error
    except ModelError as error:
        raise NotKnown(f"{path}: {error}") from error


def _single(path: Path, where: ModelLocation) -> tuple[ModelShape, StoredWeights]:
    """A GGUF file, alone or the first of several that belong together, with the config.json of its model beside it."""
    _size(path)
    if _bytes(path, len(GGUF), whole=False) != GGUF:
        raise Unusable(f"{path} is no GGUF file: for other models name the folder they are in")
    parts = [path]
    if match := re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name):
        parts = [path.with_name(f"{match[1]}-{part:05}-of-{match[3]}.gguf") for part in range(1, int(match[3]) + 1)]
    stored = StoredWeights(sum(_size(part) for part in parts[:MAX_FILES]))
    if where.shape is None and not (path.parent / CONFIG).is_file():
        raise NotKnown(f"{path} has no {CONFIG} of its model beside it (copy it there)", stored.bytes)
    # Its weights stay as they are, whatever its config says of the model that it was made of.
    return msgspec.structs.replace(_shape(where, path.parent), quantization=Quantization("gguf", None)), stored


# -- the cache --------------------------------------------------------------------------------------------------------


def _snapshot(model: str, revision: str, cache: Path) -> Path | None:
    """The folder of a hub's model in a cache; None: it is not there."""
    folder = hub_folder(model, cache)
    if folder is None:
        return None
    commit = revision
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a commit may be named itself
        commit = _bytes(folder / "refs" / revision, 200).decode("ascii", "replace").strip()
    found = folder / "snapshots" / commit
    return found if _REVISION.fullmatch(commit) and (found / CONFIG).is_file() else None


def _stored_in_cache(folder: Path, where: ModelLocation) -> StoredWeights:
    """A file missing from a cache is downloaded by vLLM, so it is no mistake; the index tells the size before that."""
    try:
        return stored_in(folder, sizes_only=where.sizes_only)
    except Unusable as error:
        absent = _absent(where, f"{where.model} is not wholly in the cache")
        try:
            index = index_from(_bytes(folder / INDEX, MAX_INDEX))
        except (FileNotFoundError, ModelError):
            raise absent from error
        if index.total is None or isinstance(absent, Unusable):
            raise absent from error
        here = sum(_size(folder / name) for name in index.files[:MAX_FILES] if (folder / name).exists())
        return StoredWeights(index.total, absent=max(0, index.total - here))


def _absent(where: ModelLocation, what: str) -> NotKnown | Unusable:
    offline = {where.environment.get(name, "").upper() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    if offline & {"1", "ON", "YES", "TRUE"}:
        return Unusable(f"{what}, and HF_HUB_OFFLINE keeps vLLM from downloading it: unset it, or download the model")
    return NotHere(f"{what}, and vLLM will download it")


# -- files ------------------------------------------------------------------------------------------------------------


def _bytes(path: Path, most: int, *, whole: bool = True) -> bytes:
    """The first `most` bytes of a plain file; `whole`: all of it, and one more if there is more. Raises OSError."""
    with open_plain(path) as file:
        return file.read(most + whole)


def _size(path: Path) -> int:
    """Bytes of a file of weights. Raises OSError, and Unusable for a pointer that git-lfs left in its place."""
    size = path.stat().st_size
    if size <= LFS_MOST and _bytes(path, len(LFS), whole=False) == LFS:
        raise Unusable(f"{path} is a pointer of git-lfs, not the weights: run `git lfs pull` in its folder")
    return size
