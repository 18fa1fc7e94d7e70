"""Rendezvous of a running gateway and its successor: a unix socket in a folder of this user's alone, and what they say.

The running one answers a connection with an Offer, and copies of its listening sockets with it (SCM_RIGHTS). The
successor starts with them, and says Ready once nothing can fail any more. Then the running one stops accepting, and
says what its calls hold: HandOffPayload. A successor that ends before that has changed nothing.

The two may be of different versions. What one says and the other does not know is left out, so a field that is added
has a default, which means what was meant before there was one.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import tempfile
from pathlib import Path

import msgspec

from gateway.decider.relays.totals import LeftRelay

_PEER = struct.Struct("3i")  # struct ucred of Linux: pid, uid, gid


class Offer(msgspec.Struct):
    """Offer of the running gateway: `data` listening sockets of the data port, then the control port's.

    `frames`: its version of the messages between relays and decider. `epoch`: of its decider; `relays`: the highest
    number of a relay. `owner`: the paths of unix sockets are its own to remove. `refused`: why it gives nothing.
    `pids`: as `HandOffPayload.relays`, but of the moment before. `member`: its cluster and its name there; empty: none.
    `life`: of that member, which goes on.
    """

    frames: int = 0
    epoch: int = 0
    relays: int = 0
    data: int = 0
    owner: bool = True
    refused: str = ""
    pids: dict[int, int] = {}
    member: str = ""
    life: str = ""


class Ready(msgspec.Struct):
    """The successor can serve. `decider`: the socket where relays tell it what they hold; empty: it does not understand
    them."""

    decider: str


class HandOffPayload(msgspec.Struct):
    """The running one has stopped. `relays`: processes by number that will tell what they hold; `left`: totals of those
    that have ended. `state`: a checkpoint of its decider. `promised`: what a member's next process must know."""

    relays: dict[int, int] = {}
    left: list[LeftRelay] = []
    state: bytes = b""
    promised: bytes = b""


class UnsafeFolder(Exception):
    """Error for a folder through which others could take over this user's gateways. The message says what is wrong."""


def rendezvous_path(host: str, port: int) -> Path:
    """The path of the socket of the gateway with this control port."""
    for name in ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"):
        given = os.environ.get(name, "").split(":")[0]
        if given:
            folder = Path(given) / "weir"
            break
    else:
        folder = Path(tempfile.gettempdir()) / f"weir-{os.geteuid()}"
    return folder / f"gateway-{host.replace('/', '_')}-{port}"


def listen_at(path: Path) -> socket.socket:
    """A listening socket at this path, in place of one that is there. Raises UnsafeFolder, OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    seen = path.parent.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid() or seen.st_mode & 0o077:
        raise UnsafeFolder(f"{path.parent}: expected a folder of this user's alone (mode 0700)")
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(str(path))
        path.chmod(0o600)
        listening.listen(8)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def line_of(message: Offer | Ready | HandOffPayload) -> bytes:
    return msgspec.json.encode(message) + b"\n"
