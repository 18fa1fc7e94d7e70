"""Take-over: a gateway that starts receives the listening sockets of the running one, or of the service manager."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path

import msgspec

from gateway.decider.relays.totals import lives
from gateway.frames.messages import VERSION
from gateway.serve.starting import StartError
from gateway.serve.upgrade.rendezvous import HandOffPayload, Offer, Ready, line_of, peer_of, rendezvous_path
from gateway.shared.addresses import split_address
from gateway.shared.lines import say
from gateway.shared.process_start import born

LATER = 2**20  # epochs: the one that runs may start processes of its own meanwhile
OFFERED_WITHIN = 10.0  # seconds
NEXT_WITHIN = 1.0  # seconds for another decider to be there, where one was killed
ANOTHER_WITHIN = 10.0  # seconds for the same while other processes of its gateway live, which wait for it
GIVEN_WITHIN = 30.0  # seconds
MOST_OFFERED = 65536  # bytes
MOST_GIVEN = 256 * 1024**2  # bytes; of 64 relays that have ended, with 10,000 tenants each
MOST_SOCKETS = 64
FIRST = 3  # descriptor of the first socket of a service manager, sd_listen_fds(3)
CONTROL = "control"  # its name for the control port's


class Predecessor(msgspec.Struct):
    """A gateway that runs, and has offered its sockets at `path`. `born`: when each process of its offer began."""

    connection: socket.socket
    pid: int
    offer: Offer
    born: dict[int, int] = {}
    path: Path = Path()

    @property
    def relays(self) -> dict[int, int]:
        """Processes of the offer that are there, by number. Once one has ended, another program may have its id."""
        return {
            number: pid for number, pid in self.offer.pids.items() if lives(pid) and born(pid) == self.born.get(pid, 0)
        }

    @property
    def understood(self) -> bool:
        """Whether both gateways speak the same version of the frames, so that the old relays can ask this decider."""
        return self.offer.frames == VERSION


class InheritedSockets(msgspec.Struct):
    """Listening sockets that are there already. `control` None, no `data`: this gateway opens them. `owner`: the paths
    of unix sockets are its own to remove."""

    data: list[socket.socket] = []
    control: socket.socket | None = None
    owner: bool = True
    taken: Predecessor | None = None

    @property
    def epoch(self) -> int:
        """Before the first of this gateway's."""
        return 0 if self.taken is None else self.taken.offer.epoch + LATER

    @property
    def relays(self) -> int:
        """The highest number of a relay before this gateway's."""
        return 0 if self.taken is None else self.taken.offer.relays


def inherited(take_over: str | None, control: str, environ: MutableMapping[str, str] = os.environ) -> InheritedSockets:
    """The sockets of the gateway that runs, or those of the service manager. `take_over`: its meeting point; empty:
    that of `control`; None: nobody is taken over. Raises StartError."""
    given = _activated(environ)
    if take_over is None:
        return given
    return _taken_over(Path(take_over) if take_over else rendezvous_path(*split_address(control)), given)


def _taken_over(path: Path, given: InheritedSockets) -> InheritedSockets:
    """Return the offer of the gateway at this path; `given` if that gateway was killed. Raises StartError."""
    until = time.monotonic() + NEXT_WITHIN
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            return _offered(path, connection)
        except _HasEnded:
            connection.close()
            if time.monotonic() > until:
                say(f"--take-over: {path}: the gateway that ran here has ended: this one serves in its place")
                return given
            time.sleep(NEXT_WITHIN / 10)
        except BaseException:
            connection.close()
            raise


class _HasEnded(Exception):
    """A process has listened there, and does no more."""


def _offered(path: Path, connection: socket.socket) -> InheritedSockets:
    """Return the offer of the gateway at this path. Raises _HasEnded, StartError."""
    connection.settimeout(OFFERED_WITHIN)
    try:
        connection.connect(str(path))
        pid, uid = peer_of(connection)
        if uid != os.geteuid():
            raise StartError(f"--take-over: {path} is of user {uid}: only that user may take its gateway over")
        line, descriptors = _received(connection)
        sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        offer = msgspec.json.decode(line, type=Offer)
    except (ConnectionRefusedError, ConnectionResetError):
        raise _HasEnded from None
    except FileNotFoundError:
        raise StartError(
            f"--take-over: no gateway of this user runs with this --control ({path}): start without --take-over"
        ) from None
    except PermissionError:
        raise StartError(f"--take-over: {path} is another user's: only that user may take its gateway over") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise StartError(f"--take-over: {path}: the gateway that runs has not answered: {error}") from error
    if offer.refused:
        raise StartError(f"--take-over: the gateway that runs (pid {pid}) refuses: {offer.refused}")
    if len(sockets) != offer.data + 1 or not all(map(_listens, sockets)):
        raise StartError(f"--take-over: the gateway that runs (pid {pid}) has not given its listening sockets")
    taken = Predecessor(connection, pid, offer, {each: born(each) for each in offer.pids.values()}, path)
    return InheritedSockets(sockets[: offer.data], sockets[offer.data], offer.owner, taken)


def _received(connection: socket.socket) -> tuple[bytes, list[int]]:
    """A line, and the descriptors that came with it. Raises OSError."""
    line, descriptors = b"", []
    while not line.endswith(b"\n"):
        data, more, _, _ = socket.recv_fds(connection, MOST_OFFERED, MOST_SOCKETS, socket.MSG_CMSG_CLOEXEC)
        descriptors += more
        line += data
        if not line:
            raise ConnectionResetError
        if not data or len(line) > MOST_OFFERED:
            raise ConnectionError("it has ended, or sends something else")
    return line, descriptors


def _listens(each: socket.socket) -> bool:
    return each.type == socket.SOCK_STREAM and bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def same_member(taken: Predecessor, member: str = "") -> None:
    """Check that a gateway takes over from the same cluster member only; empty: in no cluster. Raises StartError."""
    offer, why = taken.offer, ""
    if offer.member != member:
        is_now, would_be = (f"the member {each}" if each else "in no cluster" for each in (offer.member, member))
        why = f"is {is_now}, and this one would be {would_be}"
    elif member and not taken.understood:
        why = f"speaks version {offer.frames} of the frames, and this one {VERSION}"
    if why:
        raise StartError(
            f"--take-over: the gateway that runs (pid {taken.pid}) {why}: end that one with SIGTERM, and start this "
            "one without --take-over"
        )


def tell_ready(taken: Predecessor, decider: str) -> None:
    """Say that this gateway can serve: from then on the other stops by itself. `decider`: where its relays ask."""
    try:
        taken.connection.sendall(line_of(Ready(decider if taken.understood else "")))
    except OSError as error:  # what it has written before is read all the same
        say(f"the gateway before (pid {taken.pid}): {error}")


async def receive_payload(taken: Predecessor, ready: Callable[[], None]) -> HandOffPayload:
    """Be told what the other one's calls hold, once `ready` has said, or has had said, that this gateway can serve.
    Raises StartError."""
    if not taken.understood:
        say(
            f"the gateway before (pid {taken.pid}) speaks version {taken.offer.frames} of the frames, and this one "
            f"{VERSION}: it decides for its own calls to their end, and engines' own metrics alone tell of them here"
        )
    ready()
    taken.connection.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=taken.connection, limit=MOST_GIVEN)
    try:
        async with asyncio.timeout(GIVEN_WITHIN):
            line = await reader.readline()
        if line:
            return msgspec.json.decode(line, type=HandOffPayload)
    except TimeoutError:
        raise StartError(
            f"--take-over: the gateway that runs (pid {taken.pid}) does not stop within {GIVEN_WITHIN:g} s"
        ) from None
    except (ConnectionError, ValueError) as error:
        say(f"the gateway before (pid {taken.pid}): {error}")
    finally:
        writer.close()
    if await _goes_on(taken):
        raise StartError(
            f"--take-over: the gateway that runs has started another decider (pid {taken.pid} has ended), which was "
            "not told to stop: try again"
        )
    say(f"the gateway before (pid {taken.pid}) has ended before it could tell of its calls")
    return HandOffPayload()


async def _goes_on(taken: Predecessor) -> bool:
    """Whether a gateway whose decider has ended in the middle of this serves again. Two would grant the same engines
    then, for good. One whose decider had stopped already starts no other."""
    until = time.monotonic() + ANOTHER_WITHIN
    while taken.relays and time.monotonic() < until:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
            asked.setblocking(False)  # whoever is killed may listen for a moment after its connection has ended
            if asked.connect_ex(str(taken.path)) == 0 and peer_of(asked)[0] != taken.pid:
                return True
        await asyncio.sleep(NEXT_WITHIN / 10)
    return False


def _activated(environ: MutableMapping[str, str]) -> InheritedSockets:
    """Sockets of a service manager, which are for this process alone: sd_listen_fds(3). Raises StartError."""
    found = {name: environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    if found["LISTEN_PID"] != str(os.getpid()) or not found["LISTEN_FDS"].isdecimal():
        return InheritedSockets()
    names = found["LISTEN_FDNAMES"].split(":")
    given = InheritedSockets()
    for number in range(int(found["LISTEN_FDS"])):
        name = names[number] if number < len(names) else ""
        try:
            each = socket.socket(fileno=FIRST + number)
        except OSError as error:
            raise StartError(f"LISTEN_FDS: descriptor {FIRST + number} ({name}): {error.strerror}") from error
        each.set_inheritable(False)
        if not _listens(each):
            raise StartError(f"LISTEN_FDS: descriptor {FIRST + number} ({name}) is no ListenStream= of a socket unit")
        if name == CONTROL:
            given.control = each
        else:
            given.data.append(each)
    given.owner = not given.data  # a path of the socket unit stays for the next gateway
    return given
