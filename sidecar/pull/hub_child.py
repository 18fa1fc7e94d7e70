"""Child process that fetches from a hub by huggingface_hub, an optional dependency. `sidecar/pull/hub.py` starts it.

A process of its own can be ended at any moment; the library's threads cannot. Standard input brings a task as one line
of JSON and then stays open: the child ends with its parent. Standard output is a listing, standard error one message.
"""

from __future__ import annotations

import glob
import json
import os
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import HfApi, get_token, snapshot_download
from huggingface_hub.hf_api import RepoFile

from gateway.shared.addresses import is_loopback

WORKERS = 2  # files at the same time: what a kill loses, as the library begins a file anew


def main() -> None:
    """Carry out the task of standard input."""
    sys.excepthook = _say
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    api = HfApi(token=get_token() or False)
    where = urlsplit(api.endpoint)
    if api.token and where.scheme != "https" and not is_loopback(where.hostname or ""):
        raise ValueError(f"the hub's token would cross the network in the clear to {where.netloc}: use https")
    if "into" in task:
        _fetch(api, **task)
    else:
        print(json.dumps(_listed(api, **task)))


def _listed(api: HfApi, model: str, revision: str) -> dict[str, Any]:
    commit = api.repo_info(model, revision=revision).sha
    tree = api.list_repo_tree(model, recursive=True, revision=commit)
    files = [{"name": file.path, "size": file.size} for file in tree if isinstance(file, RepoFile)]
    return {"source": f"{api.endpoint}/{model}", "commit": commit, "files": files}


def _fetch(api: HfApi, model: str, revision: str, into: str, names: list[str]) -> None:
    snapshot_download(
        model,
        revision=revision,
        local_dir=into,
        allow_patterns=[glob.escape(name) for name in names],
        max_workers=WORKERS,
        token=api.token,
    )
    # The library compares sizes; checksums are compared where somebody asks for it.
    wrong = api.verify_repo_checksums(model, revision=revision, local_dir=into).mismatches
    for each in wrong:
        (Path(into) / each["path"]).unlink()
    if wrong:
        raise ValueError(f"{', '.join(each['path'] for each in wrong)}: another checksum than the hub lists")


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def _say(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
    print(f"{kind.__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
