"""Which unix sockets may be engines': those in a folder that a sidecar of this very user has made for them.

A sidecar names the socket of each engine, and every prompt goes there. A path proves nothing: Docker's socket is one
too, an agent's, a message bus. So the folder must carry the mark of a sidecar, and nobody but its owner may write
there: the user of this process, or root.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gateway.shared.protocol import SOCKETS_MARK

FOREIGN = stat.S_IWGRP | stat.S_IRWXO  # what others than the owner may do with a folder that is not only its own


def socket_refusal(path: str) -> str:
    """Why calls may not be sent to the socket at `path`, in words; empty: they may."""
    folder = os.path.dirname(path)
    if os.path.normpath(path) != path or os.path.realpath(folder) != folder:
        return "its path is not a plain one: no links, no . or .."
    try:
        seen, mark = os.lstat(folder), os.lstat(Path(folder) / SOCKETS_MARK)
    except OSError:
        return f"its folder is none that a sidecar has made for engines: {SOCKETS_MARK} is not there"
    users = (os.geteuid(), 0)
    if seen.st_uid not in users or mark.st_uid != seen.st_uid or not stat.S_ISREG(mark.st_mode):
        return "its folder belongs to another user than the gateway's"
    return "its folder is open to other users: it should be 0700" if seen.st_mode & FOREIGN else ""
