"""Free addresses for a new engine: a port, or a socket path that nobody holds.

Both are looks, not reservations. Between the look and the engine's own bind another process may be faster, and the
engine then exits as it does for any port in use. The caller passes the addresses it has given away itself as `taken`.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from sidecar.core.addresses import LONGEST_SOCKET, LOOPBACK

CONNECTIONS = Path("/proc/net/tcp")  # every TCP socket of this network namespace, its local address the second field
BOUND = Path("/proc/net/unix")  # every bound unix socket of this network namespace, the path its last field


class AddressTaken(Exception):
    """No port is free, or something else is at a socket's path; the message says what, and what to do."""


def free_port(ports: Iterable[int], *, taken: Collection[int] = ()) -> int:
    """The first of `ports` of LOOPBACK on which a server can start now. Raises AddressTaken.

    Asked for without SO_REUSEADDR, on purpose: vLLM binds with it minutes before it listens, and until then a bind
    that has it too would succeed. Where none is free so, it is asked for with it where connections linger: those that
    an engine has closed last for a minute after its end.
    """
    refused, left = "", [port for port in ports if port not in taken]
    for reused in (False, True):
        for port in _lingering(left) if reused else left:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reused)
                try:
                    probe.bind((LOOPBACK, port))
                except OSError as error:
                    refused = f"; the last one: {error.strerror}"
                    continue
                return int(probe.getsockname()[1])
    raise AddressTaken(
        f"no free port on {LOOPBACK} in the sidecar's pool{refused}: give it more ports, or end what is there"
    )


def _lingering(ports: Collection[int]) -> list[int]:
    """Return the ports of these that have connections; none where the system does not tell."""
    try:
        local = [line.split()[1] for line in CONNECTIONS.read_text().splitlines()[1:]]
    except OSError:
        return []
    found = {int(address.rpartition(":")[2], 16) for address in local}
    return [port for port in ports if port in found]


def clear_socket(path: Path) -> None:
    """Make a socket's path free: what a dead engine left there is removed. Raises AddressTaken, and removes nothing.

    A socket that a process has bound without listening yet (vLLM, for the minutes that it loads) refuses a connection
    as a dead one does; the kernel's list of bound sockets tells them apart.
    """
    name = os.fspath(path)
    if len(os.fsencode(name)) > LONGEST_SOCKET:
        raise AddressTaken(
            f"{name}: longer than the {LONGEST_SOCKET} bytes of a unix socket's path: choose a shorter one"
        )
    try:
        mode = path.lstat().st_mode
        if not stat.S_ISSOCK(mode):
            raise AddressTaken(f"{name} is there and is no socket: it was not removed; move it, or choose another path")
        if _held(name):
            raise AddressTaken(f"{name}: another process has this socket: end it, or choose another path")
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise AddressTaken(f"{name} cannot be freed for an engine: {error.strerror}") from error


def _held(name: str) -> bool:
    """Whether any process has the socket at this path. Raises OSError where that cannot be told."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(name)
        except ConnectionRefusedError:
            lines = BOUND.read_text(errors="surrogateescape").splitlines()
            return any(line.split(maxsplit=7)[7:] == [name] for line in lines)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EPROTOTYPE):  # its queue is full; it takes datagrams
                raise
    return True
