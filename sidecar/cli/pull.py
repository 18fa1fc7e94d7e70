"""`sidecar pull`: a model's files, from a folder or a hub, into the folder that its profile names."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from gateway.shared.command_line import argument
from gateway.shared.formatting import gibs, seconds, shown
from sidecar.cli.errors import Impossible, Mistake
from sidecar.cli.files import File, add_config
from sidecar.core.arguments import environment
from sidecar.core.engine_records import Unusable
from sidecar.pull import hub
from sidecar.pull.listing import HUB_ID, REVISION, Listing, PullError, select
from sidecar.pull.staging import Pulled, Staging, copy_file, list_folder, pull_into, write_reference
from sidecar.sizing.model_files import cache_folder, stored_in

AS_FOLDER = "a folder in model_path is written with / or ./ before it"

DESCRIPTION = "Fetch a model's files."
EXAMPLES = """\
Puts a model's files where its profile's `model_path` is: a folder, or for a hub's id the hub's cache on this machine,
where vLLM looks. They come from --from: a folder (NFS, another disk), or a hub's id, which needs the extra `hub`.
A hub's id in `model_path` needs no --from.

The model appears whole or not at all: files gather in a hidden folder beside it, and one rename shows them once all are
there with their sizes and checksums (the hub's, or those of a SHA256SUMS in the folder). After Ctrl-C, a full disk or a
power cut the next pull goes on from the whole files. No model is started or ended by it.

HF_TOKEN in the environment, or the token of `hf auth login`, is shown to the hub, and to nobody else. HF_ENDPOINT names
a mirror that speaks its API.
Copies of the weights in other formats are left out: --all-files takes them too.

exit status: 0 it is there; 1 it could not be had, standard error says why; 2 a mistake in the command or the file

examples:
  sidecar pull qwen-7b                           model_path: Qwen/Qwen2.5-7B-Instruct
  sidecar pull qwen-7b --from /nfs/models/qwen-7b
  sidecar pull qwen-7b --from Qwen/Qwen2.5-7B-Instruct --revision main
  sidecar pull qwen-gguf --from Qwen/Qwen2.5-7B-Instruct-GGUF --only '*q4_k_m*.gguf'"""
EVERY = 5.0  # seconds between two lines
MIB = 1 << 20


class PullProgress:
    """A line at the beginning and every few seconds. `say` gets each line; `clock` gives seconds."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._began = self._said = clock()
        self._size = self._resumed = 0

    def begin(self, listing: Listing, resumed: int) -> None:
        """Name the source, and the bytes that an earlier pull has left."""
        self._began = self._said = self._clock()
        self._size, self._resumed = listing.size, resumed
        kept = f", {gibs(resumed)} are here already" if resumed else ""
        self._say(f"{len(listing.files)} files, {gibs(listing.size)}, from {shown(listing.source)}{kept}")

    def here(self, size: int) -> None:
        """Note the bytes that are here now."""
        now = self._clock()
        if now < self._said + EVERY:
            return
        self._said = now
        if size >= self._size:
            self._say(f"all {gibs(self._size)} have come, checksums are compared")
            return
        rate = (size - self._resumed) / (now - self._began)
        left = f", {seconds((self._size - size) / rate)} left" if rate > 0 else ""
        share = size / max(1, self._size)
        self._say(f"{gibs(size)} of {gibs(self._size)}, {share:.0%}, {rate / MIB:.0f} MiB/s{left}")


def stderr_progress(*, quiet: bool) -> PullProgress:
    """Progress on standard error: one line that changes on a terminal, else line by line; `quiet`: nothing."""
    if quiet:
        return PullProgress(lambda _: None)
    before, after = ("\r\x1b[K", "") if sys.stderr.isatty() else ("", "\n")
    return PullProgress(lambda line: print(f"{before}sidecar: {line}", end=after, file=sys.stderr, flush=True))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("model", metavar="MODEL", help="the name of its profile")
    parser.add_argument("--from", dest="source", metavar="SOURCE", help="a folder, or a hub's id")
    parser.add_argument("--revision", type=argument(_revision), metavar="NAME", help="of a hub's model (default: main)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="GLOB", help="of the weights those that match; may be repeated"
    )
    parser.add_argument("--all-files", action="store_true", help="all formats of the weights, and other files")
    parser.add_argument("--replace", action="store_true", help="put it in the place of another model that is there")
    parser.add_argument("--json", action="store_true", help="the outcome as JSON, and no progress")


def command(given: argparse.Namespace) -> int:
    """Fetch a model's files. Raises Mistake, Impossible."""
    file = File(given.config)
    profile = file.profile(given.model)
    began = time.monotonic()
    try:
        found = _pull(file, profile, given)
    except (PullError, OSError) as error:
        raise Impossible(f"{profile}: {shown(str(error))}") from error
    except KeyboardInterrupt:
        print("sidecar: whole files are kept, and the next pull goes on from there", file=sys.stderr)
        raise
    took = time.monotonic() - began
    if given.json:
        print(msgspec.json.encode(found).decode())
    elif found.was_there:
        print(f"{profile}: all {found.files} files are in {found.folder} already")
    else:
        kept = f", {gibs(found.resumed)} of it by an earlier pull" if found.resumed else ""
        print(f"{profile}: {gibs(found.size)} in {found.folder} after {seconds(took)}{kept}")
        print(f"sidecar: `sidecar ensure {profile}` has it started", file=sys.stderr)
    return 0


def _pull(file: File, profile: str, given: argparse.Namespace) -> Pulled:
    settings, engine = file.config.models[profile], file.config.engine_of(profile)
    model, path = settings.model_path, file.folder / settings.model_path
    local = model.startswith(("/", ".", "~")) or path.exists() or not HUB_ID.fullmatch(model)
    is_file = local and path.suffix == ".gguf"
    if is_file and given.replace:
        raise Mistake(
            f"--replace is for a model in a folder of its own, and model_path names a file, {path}: remove that"
        )
    source = _source(file, model, local, given)
    wanted = partial(select, only=given.only, everything=given.all_files)
    if isinstance(source, Path):
        return _into(source, list_folder(source, wanted), path.parent if is_file else path, path, given)
    flag = settings.flags.get("revision")
    revision = given.revision or (flag if isinstance(flag, str) and REVISION.fullmatch(flag) else "main")
    listing = hub.list_hub(source, revision, wanted)
    if local:
        return _into(source, listing, path.parent if is_file else path, path, given)
    cache = cache_folder(environment(settings, engine, (), os.environ)) / f"models--{model.replace('/', '--')}"
    snapshot = cache / "snapshots" / listing.commit
    found = _into(source, listing, snapshot, snapshot, given)
    if revision != listing.commit:
        # Written last: vLLM takes a snapshot that a reference names for whole, and does not ask the hub.
        write_reference(cache / "refs" / revision, listing.commit)
    return found


def _source(file: File, model: str, local: bool, given: argparse.Namespace) -> Path | str:
    """A folder, or a hub's id. Raises Mistake."""
    name: str | None = given.source
    if name is None and local:
        raise Mistake(f"{model} is a folder: --from says where its files come from: a folder or a hub's id")
    if name is None or (name == model and not local):
        return model
    if name.startswith(("http://", "https://")):
        raise Mistake("--from takes no URL: fetch the files into a folder (wget --recursive), and name that")
    if (file.folder / name).is_dir():
        if not local:
            raise Mistake(f"model_path {model} is a hub's id, and --from is none: {AS_FOLDER}")
        return file.folder / name
    if HUB_ID.fullmatch(name) is None:
        raise Mistake(f"--from {name}: there is no such folder, and it is no hub's id")
    if not local:
        raise Mistake(f"model_path {model} is a hub's id, and --from names another: {AS_FOLDER}")
    return name


def _into(source: Path | str, listing: Listing, target: Path, model: Path, given: argparse.Namespace) -> Pulled:
    """Bring a listing's files from its source to a folder. `model`: that folder, or a file in it that has to come."""
    wanted = "" if model == target else model.name

    def check(folder: Path) -> None:
        if wanted and not (folder / wanted).is_file():
            raise PullError(f"{listing.source} has no {wanted}, which model_path names")
        try:
            if not wanted:
                stored_in(folder)
        except Unusable as error:
            said = str(error).replace(str(folder), listing.source)
            raise PullError(f"the source's model is not whole: {said}") from error

    fetch = partial(_fetch, source, listing, stderr_progress(quiet=given.json))
    return pull_into(target.resolve(), listing, fetch, check, replace=given.replace)


def _fetch(source: Path | str, listing: Listing, progress: PullProgress, staging: Staging) -> None:
    missing = staging.missing()
    here = listing.size - sum(file.size for file in missing)
    progress.begin(listing, here)
    if isinstance(source, str):
        hub.fetch(source, listing, staging.files, progress.here)
        return

    def came(size: int) -> None:
        nonlocal here
        here += size
        progress.here(here)

    for file in missing:
        to = staging.files / file.name
        to.parent.mkdir(parents=True, exist_ok=True)
        copy_file(source, file, to, came)


def _revision(text: str) -> str:
    if REVISION.fullmatch(text) is None:
        raise ValueError(f"a branch, a tag or a commit, not {text!r}")
    return text
