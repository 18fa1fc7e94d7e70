"""`sidecar pull`: a model's files, from a folder, a hub or a web server, into the folder that its profile names."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TypeAlias

import msgspec

from gateway.shared.command_line import argument
from gateway.shared.formatting import gibs, seconds, shown
from sidecar.cli.errors import Impossible, Mistake
from sidecar.cli.files import File, add_config
from sidecar.cli.pull_progress import shows
from sidecar.core.arguments import environment
from sidecar.core.engine_records import Unusable
from sidecar.pull.folder import FolderSource
from sidecar.pull.http_source import HubSource, WebFolderSource
from sidecar.pull.listing import HUB_ID, REVISION, BadListing, Listing
from sidecar.pull.source import SourceError
from sidecar.pull.staging import BadContent, Staging, StagingError, point
from sidecar.pull.transfer import Pulled, pulled
from sidecar.sizing.model_files import cache_folder, stored_in

HUB = "https://huggingface.co"  # unless HF_ENDPOINT says otherwise
AS_FOLDER = "a folder in model_path is written with / or ./ before it"

DESCRIPTION = "Fetch a model's files."
EXAMPLES = """\
Puts a model's files where its profile's `model_path` is: a folder, or for a hub's id the hub's cache on this machine,
where vLLM looks. They come from --from: a folder (NFS, another disk), a hub's id, or the URL of a web server's folder.
A hub's id in `model_path` needs no --from.

The model appears whole or not at all: files gather in a hidden folder beside it, and one rename shows them once all are
there with their sizes and checksums (the hub's, or those of a SHA256SUMS in the folder). Ctrl-C, a full disk or a power
cut lose nothing: the next pull goes on where this one ended. No model is started or ended by it.

HF_TOKEN in the environment is shown to the hub, and to nobody else. HF_ENDPOINT names a mirror that speaks its API.
Copies of the weights in other formats are left out: --all-files takes them too.

exit status: 0 it is there; 1 it could not be had, standard error says why; 2 a mistake in the command or the file

examples:
  sidecar pull qwen-7b                           model_path: Qwen/Qwen2.5-7B-Instruct
  sidecar pull qwen-7b --from /nfs/models/qwen-7b
  sidecar pull qwen-7b --from Qwen/Qwen2.5-7B-Instruct --revision main
  sidecar pull qwen-7b --from http://files.example/models/qwen-7b
  sidecar pull qwen-gguf --from Qwen/Qwen2.5-7B-Instruct-GGUF --only '*q4_k_m*.gguf'"""

AnySource: TypeAlias = FolderSource | HubSource | WebFolderSource


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("model", metavar="MODEL", help="the name of its profile")
    parser.add_argument("--from", dest="source", metavar="SOURCE", help="a folder, a hub's id, or an http(s) URL")
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
    except (BadListing, SourceError, StagingError, BadContent) as error:
        raise Impossible(f"{profile}: {shown(str(error))}") from error
    except KeyboardInterrupt:
        print("sidecar: what has come is kept, and the next pull goes on from there", file=sys.stderr)
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
    path = file.folder / settings.model_path
    local = (
        settings.model_path.startswith(("/", ".", "~")) or path.exists() or not HUB_ID.fullmatch(settings.model_path)
    )
    is_file = local and path.suffix == ".gguf"
    if is_file and given.replace:
        raise Mistake(
            f"--replace is for a model in a folder of its own, and model_path names a file, {path}: remove that"
        )
    told = settings.flags.get("revision")
    revision = given.revision or (told if isinstance(told, str) and REVISION.fullmatch(told) else "main")
    source = _source(file, settings.model_path, local, revision, given)
    try:
        listing = source.listing()
        if local:
            target, wanted = (path.parent, path.name) if is_file else (path, "")
            return _into(source, listing, target, wanted, given)
        env = environment(settings, engine, (), os.environ)
        cache = cache_folder(env) / f"models--{settings.model_path.replace('/', '--')}"
        found = _into(source, listing, cache / "snapshots" / listing.commit, "", given)
        if revision != listing.commit:
            point(cache / "refs" / revision, listing.commit)
        return found
    finally:
        if not isinstance(source, FolderSource):
            source.close()


def _source(file: File, model: str, local: bool, revision: str, given: argparse.Namespace) -> AnySource:
    """Raises Mistake, SourceError."""
    more = given.only, given.all_files
    name = given.source
    if name is None and local:
        raise Mistake(f"{model} is a folder: --from says where its files come from: a folder, a hub's id or a URL")
    name = model if name is None else name
    is_url = name.startswith(("http://", "https://"))
    folder = None if is_url or (not local and name == model) else file.folder / name
    if is_url or (folder is not None and folder.is_dir()):
        if not local:
            raise Mistake(f"model_path {model} is a hub's id, and --from is none: {AS_FOLDER}")
        if is_url:
            return WebFolderSource(name, more[0], everything=more[1])
        return FolderSource(folder or file.folder, more[0], everything=more[1])
    if HUB_ID.fullmatch(name) is None:
        raise Mistake(f"--from {name}: there is no such folder, and it is no hub's id or http(s) URL")
    if not local and name != model:
        raise Mistake(f"model_path {model} is a hub's id, and --from names another: {AS_FOLDER}")
    endpoint, token = os.environ.get("HF_ENDPOINT") or HUB, os.environ.get("HF_TOKEN") or None
    return HubSource(endpoint, name, revision, token, more[0], everything=more[1])


def _into(source: AnySource, listing: Listing, target: Path, wanted: str, given: argparse.Namespace) -> Pulled:
    """`wanted`: a file that has to be among them, else weights as vLLM loads them."""

    def check(folder: Path) -> None:
        if wanted and not (folder / wanted).is_file():
            raise SourceError(f"{listing.source} has no {wanted}, which model_path names")
        try:
            if not wanted:
                stored_in(folder)
        except Unusable as error:
            said = str(error).replace(str(folder), listing.source)
            raise SourceError(f"the source's model is not whole: {said}") from error

    watcher = shows(quiet=given.json)
    try:
        return pulled(source, listing, Staging(target.resolve()), watcher, check, replace=given.replace)
    finally:
        watcher.close()


def _revision(text: str) -> str:
    if REVISION.fullmatch(text) is None:
        raise ValueError(f"a branch, a tag or a commit, not {text!r}")
    return text
