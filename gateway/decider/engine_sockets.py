"""Check of unix sockets that sidecars name as engines': accepted only in a folder that a sidecar of this user has made.

A sidecar names each engine's socket, and every prompt goes there. A path alone proves nothing, since Docker, agents and
message buses listen on sockets too. So the folder must hold a sidecar's mark file, and only its owner may write there.
The owner must be the user of this process, or root.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gateway.shared.protocol import SOCKETS_MARK

FOREIGN = stat.S_IWGRP | stat.S_IRWXO  # permissions of other users that a sidecar's folder must not give


def socket_refusal(path: str) -> str:
    """The reason why calls may not be sent to the socket at `path`; empty: they may."""
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
