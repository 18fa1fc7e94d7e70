"""Parent of one gateway's processes: it holds the listening sockets, and keeps a decider and its relays alive.

It has no threads, no event loop and no knowledge of calls: there is little in it that could fail. Children are forked,
so a new one is there in milliseconds, with the key of Python's hashes that all of them share. One that ends is started
again; one that is stopped, or says nothing for SILENT looks, is killed first. SIGTERM to the parent is an order to the
decider, which drains the relays; a second one cuts that short. Children ignore SIGTERM: who sends it to all, in any
order, ends the gateway as who sends it to the parent, and who sends it to a child alone takes nothing away.
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

from gateway.relay.wire.seat_board import seat_board
from gateway.serve.processes.place import CLOSING, HANDED, OFFERED, READY, TAKE, TOLD, Place, Role, die_with
from gateway.serve.processes.process import SILENT, STARTS, Process
from gateway.serve.upgrade.next_gateway import NextGateway
from gateway.serve.upgrade.receiver import InheritedSockets, tell_ready
from gateway.shared.service_manager import ServiceManager

LOOK = 0.4  # seconds between two looks at who is silent
QUICK = 2.0  # seconds: who ends within them is started again later each time
LATEST = 5.0  # seconds
ENDS_WITHIN = 3.0  # seconds for relays to end once their decider has
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD)


class Parent:
    """`body` is a child's life, and gives its exit status; `say` takes lines for the operator. `inherited`: from a
    gateway that is taken over, or the service manager; `successor` starts one that takes this one over."""

    def __init__(
        self,
        relays: int,
        data: Sequence[socket.socket],
        control: socket.socket,
        body: Callable[[Place], int],
        say: Callable[[str], None],
        inherited: InheritedSockets,
        successor: NextGateway,
    ) -> None:
        self._relays = relays
        self._seats = seat_board(relays)
        self._data = list(data)
        self._control = control
        self._body = body
        self._say = say
        self._folder = tempfile.mkdtemp(prefix="weir-")
        self._path = str(Path(self._folder) / "decider")
        self._inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._inner.bind(self._path)
        self._inner.listen(256)
        self._secret = secrets.token_hex(32)
        self._started = time.time()
        self._children: dict[int, Process] = {}
        self._due: dict[tuple[Role, int], float] = {}  # when to start it again
        self._quick: dict[tuple[Role, int], int] = {}  # ends in a row, soon after a start
        self._inherited = inherited
        self._successor = successor
        self._epoch = self._inherited.epoch
        self._begun: set[tuple[Role, int]] = set()  # those that were started once
        self._handed = self._offered = False  # another gateway has the sockets; it has, or had, copies of them
        self._taken = False  # the gateway before stops: nobody else is left to serve
        self._ready: set[tuple[Role, int]] = set()  # those that have served once
        self._told = False  # a decider has told the operator where the gateway listens
        self._terms = 0  # signals to end
        self._asked = 0  # those of them that the decider was told of
        self._answered = 0  # those of them that a hand-over has answered: this gateway ends by it
        self._hangup = self._upgrade = False
        self._ends_by, self._status = 0.0, 0
        self._manager = ServiceManager()
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> int:
        """Run until a signal ends the gateway and every child has ended. Returns the exit status."""
        before = {number: signal.signal(number, self._signalled) for number in SIGNALS}
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        try:
            self._start("decider", 0)
            for number in range(1, self._relays + 1):
                self._start("relay", self._inherited.relays + number)
            looked = time.monotonic()
            while self._children or (self._due and not self._terms):
                takes = self._wait()
                self._reap()
                if takes:  # after the dead are known: a gateway that gives up leaves the one before
                    self._take()
                self._forward()
                if time.monotonic() >= looked + LOOK:
                    looked = time.monotonic()
                    self._look()
                self._start_due()
        finally:
            for child in self._children.values():
                os.kill(child.pid, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._manager.__exit__()
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._status

    # -- children -----------------------------------------------------------------------------------------------

    def _start(self, role: Role, number: int) -> None:
        """Start a child. Raises OSError where the system has no room for it."""
        self._epoch += 1
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        living = {each.place.number: each.pid for each in self._children.values() if each.place.role == "relay"}
        place = Place(
            role=role,
            number=number,
            epoch=self._epoch,
            relays=self._relays,
            data=self._data,
            control=self._control,
            inner=self._inner,
            path=self._path,
            beats=theirs,
            living=living if role == "decider" else {},
            secret=self._secret,
            parent=os.getpid(),
            started=time.time(),
            parent_started=self._started,
            first=(role, number) not in self._begun,
            told=self._told,
            inherited=self._inherited,
            seats=self._seats,
        )
        self._begun.add((role, number))
        _tell_seats(place, True)  # clients wait for the moment that it takes
        pid = _forked(place, ours, theirs)
        if pid == 0:
            self._child(place, ours)
        theirs.close()
        self._children[pid] = Process(place, pid, ours)

    def _take(self) -> None:
        """Tell the gateway before to stop, unless this one is about to end: who starts its children again, or gives up,
        is who says so. Else both could stop."""
        taken = self._inherited.taken
        if taken is not None and not self._taken and not self._terms:
            self._taken = True
            tell_ready(taken, self._path)
            taken.connection.close()

    @property
    def _goes_on_before(self) -> bool:
        """Whether the gateway that is to be taken over serves, and nobody here."""
        return self._inherited.taken is not None and not self._taken

    def _child(self, place: Place, ours: socket.socket) -> None:
        """Does not return."""
        status = 1
        try:
            die_with(place.parent)
            os.setpgid(0, 0)  # Ctrl-C and Ctrl-Z are for the parent
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:  # SIG_IGN would be inherited by programs that the child starts
                signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else lambda *_: None)
            for descriptor in (self._wake, self._woken):
                os.close(descriptor)
            taken = self._inherited.taken
            if place.role == "relay" and taken is not None:  # the first decider alone receives what its calls hold
                taken.connection.close()
            for other in (ours, *(child.beats for child in self._children.values())):
                other.close()  # else their ends would not be seen
            status = self._body(place)
        except BaseException:  # the last frame of the process: what it was is told
            traceback.print_exc()
        finally:
            _flush()
            os._exit(status)

    def _wait(self) -> bool:
        """Wait for a signal, a sign of life, or the next look. Returns whether a child can serve in place of the
        gateway before."""
        takes = False
        poll = select.poll()
        by_descriptor = {child.beats.fileno(): child for child in self._children.values()}
        for descriptor in (self._wake, *by_descriptor):
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(LOOK * 1000 / 2):
            if descriptor == self._wake:
                os.read(self._wake, 4096)
                continue
            signs = self._hear(by_descriptor[descriptor])
            if not signs:
                time.sleep(0.001)  # it has ended, and is about to be reaped
            takes = takes or TAKE in signs
        return takes

    def _hear(self, child: Process) -> bytes:
        """Take note of what a child has said since, and return that; b"": nothing, or it has ended."""
        signs = child.hear()
        if READY in signs:
            self._ready.add((child.place.role, child.place.number))
            if child.place.role == "decider":
                self._manager.ready(f"{self._relays} relays and a decider", loops=False)
        self._told, self._offered = self._told or TOLD in signs, self._offered or OFFERED in signs
        if CLOSING in signs and self._terms:
            self._close()
        if HANDED in signs:
            self._handed, self._answered = True, self._terms
            self._due.clear()  # nobody would ever end a relay that starts now
            if self._successor.pid:
                self._manager.succeeded_by(self._successor.pid)
            self._close()
        return signs

    def _close(self) -> None:
        """No connection is taken any more. The paths stay for a gateway that has, or that gave, these sockets."""
        gave = self._inherited.taken is not None and ("decider", 0) not in self._ready
        _close(self._data, self._control, owned=self._inherited.owner and not (gave or self._offered))
        self._data = []

    def _reap(self) -> None:
        """Take note of who has ended, and end who was stopped."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child, stopped = self._children.get(pid), os.WIFSTOPPED(status)
            if child is not None and stopped:
                self._say(f"{child} was stopped: it is killed")
                os.kill(pid, signal.SIGKILL)
            elif child is not None:
                self._hear(child)  # its last words decide what its end means
                self._ended(child, os.waitstatus_to_exitcode(status))
            elif not stopped:  # who stops it lets it go on, or ends it
                self._successor.ended(pid, status)

    def _ended(self, child: Process, code: int) -> None:
        del self._children[child.pid]
        child.beats.close()
        who = (child.place.role, child.place.number)
        _tell_seats(child.place, False)
        if self._terms > self._answered:
            if child.place.role == "decider":
                self._decider_gone()
            return
        if self._handed:  # the others finish what they have
            if child.place.role == "decider":
                for other in self._children.values():  # one that has not been told would accept, and ask nobody
                    other.order_end()
            return
        if who not in self._ready and not (self._taken and code < 0):  # it cannot start
            if code < 0:  # else it has said why
                self._say(f"{child} was killed by signal {-code} before it served: the gateway stops")
            self._status, self._terms = max(1, code), 1
            self._decider_gone()
            return
        quick = time.monotonic() - child.at < QUICK
        self._quick[who] = self._quick.get(who, 0) + 1 if quick else 0
        pause = min(LATEST, 0.1 * 2 ** self._quick[who]) if quick else 0.0
        why = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        self._say(f"{child} {why}: another is started{f' in {pause:.1f} s' if pause else ''}")
        self._due[who] = time.monotonic() + pause

    def _start_due(self) -> None:
        now = time.monotonic()
        for who in [who for who, at in self._due.items() if at <= now and not self._terms]:
            del self._due[who]
            try:
                self._start(*who)
            except OSError as error:  # as of a machine that has no process or memory left: the others go on
                self._say(f"no {who[0]} can be started: {error}: again in {LATEST:g} s")
                self._due[who] = now + LATEST

    def _look(self) -> None:
        """Kill who has said nothing for too long."""
        self._manager.beat()
        for child in self._children.values():
            child.look()
            if child.silent > SILENT:
                self._say(f"{child} hangs: it is killed")
                child.silent = SILENT - STARTS
                os.kill(child.pid, signal.SIGKILL)
        if self._ends_by and time.monotonic() > self._ends_by:
            for child in self._children.values():
                os.kill(child.pid, signal.SIGKILL)

    # -- the end ------------------------------------------------------------------------------------------------

    def _signalled(self, number: int, _: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self._terms += 1
        elif number == signal.SIGHUP:
            self._hangup = True
        elif number == signal.SIGUSR2:
            self._upgrade = True

    def _forward(self) -> None:
        """Pass on the signals that have come."""
        if self._upgrade:
            self._upgrade = False
            if not self._handed:
                self._successor.start()
        if self._hangup:
            self._hangup = False
            for child in self._children.values():
                os.kill(child.pid, signal.SIGHUP)
        if self._terms > self._asked:
            self._manager.stopping()
            deciders = [child for child in self._children.values() if child.place.role == "decider"]
            for child in deciders:
                for _ in range(min(2, self._terms) - min(2, self._asked)):
                    child.order_end()
            if not deciders or self._goes_on_before:
                self._decider_gone()
            self._asked = self._terms

    def _decider_gone(self) -> None:
        """End the relays that are left: at once if the gateway before still serves and nobody serves here."""
        self._asked = self._terms
        self._close()
        self._ends_by = time.monotonic() + ENDS_WITHIN
        for child in self._children.values():
            if self._goes_on_before:
                os.kill(child.pid, signal.SIGKILL)
            else:
                child.order_end()


def _forked(place: Place, *pipes: socket.socket) -> int:
    """Fork, and return what fork(2) does. Raises OSError where the system has no room: the child's seats and pipes are
    free then."""
    _flush()
    try:
        return os.fork()
    except OSError:
        _tell_seats(place, False)
        for pipe in pipes:
            pipe.close()
        raise


def _close(data: Iterable[socket.socket], control: socket.socket, *, owned: bool) -> None:
    """Close this process's listening sockets. `owned`: the paths of unix sockets for data are this gateway's, and go
    too."""
    control.close()  # the decider has its own
    for each in data:
        if owned and each.family == socket.AF_UNIX and each.fileno() >= 0:
            Path(each.getsockname()).unlink(missing_ok=True)
        each.close()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _tell_seats(place: Place, free: bool) -> None:
    """Show other relays whether a relay that starts or has ended has a free seat."""
    if place.role == "relay" and place.own_seats is not None:
        place.own_seats.tell(free)
