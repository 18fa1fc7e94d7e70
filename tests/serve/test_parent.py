"""Parent of several processes: whoever ends, is stopped or hangs is replaced, and nobody else is touched."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.serve.processes.place import ALIVE, OFFERED, READY, TAKE
from loadtest.processes import Child, until
from tests.serve.test_processes import state

pytestmark = pytest.mark.slow  # every one starts processes

# Children that live, serve, and do nothing; `hang` in the folder of a relay's number ends its signs of life.
PROGRAM = """
import errno, os, select, signal, socket, sys, time
from pathlib import Path
from gateway.serve.processes import parent
from gateway.serve.processes.parent import Parent
from gateway.serve.processes.place import ALIVE, CLOSING, END, HANDED, READY, TAKE
from gateway.serve.upgrade.next_gateway import NextGateway
from gateway.serve.upgrade.receiver import InheritedSockets, Predecessor
from gateway.serve.upgrade.rendezvous import Offer

folder = Path(sys.argv[1])
parent.ENDS_WITHIN = 60.0  # a relay that waits for a core is not killed before it can say that it ends

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # whole, whoever else writes

def starve():
    # A neighbour on the same core leaves an idle process next to nothing.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    starved = os.getpid()
    neighbour = os.fork()
    while neighbour == 0:
        if os.getppid() != starved:
            os._exit(0)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    tell(starved, "starves")
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        pass
    os.kill(neighbour, signal.SIGKILL)
    os.waitpid(neighbour, 0)
    tell(starved, "has a core again")

def body(place):
    name = f"{place.role}-{place.number}"
    place.beats.setblocking(True)
    tell(name, os.getpid(), hash(b"the same in all"), sorted(place.living))
    if (folder / f"{name}-cannot").exists():
        return 2
    begun = folder / f"{name}-begins-with"
    signs = begun.read_bytes() if begun.exists() else READY
    begun.unlink(missing_ok=True)
    place.beats.send(ALIVE + signs)
    tell(name, "has begun")
    stays = folder / f"{name}-stays"
    if place.role == "relay":
        place.control.close()
    while stays.exists() or not (select.select([place.beats], [], [], 0.05)[0] and END in place.beats.recv(64)):
        if place.role == "decider" and (folder / "hands-over").exists():
            (folder / "hands-over").unlink()
            place.beats.send(HANDED)
            break
        starves = folder / f"{name}-{os.getpid()}-starves"
        if starves.exists():
            starves.unlink()
            starve()
        if (folder / f"{name}-{os.getpid()}-loops").exists():
            while True:
                pass
        if not (folder / f"{name}-{os.getpid()}-hangs").exists():
            takes = (folder / "takes").exists()
            place.beats.send(ALIVE + (TAKE if takes else b""))
            if takes:
                tell(name, "can take over")
    if place.role == "decider":
        place.beats.send(CLOSING)
    tell(name, "ends")
    return 0

def fork(fork=os.fork):
    if (folder / "no-room").exists():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return fork()

def waitpid(pid, options, waitpid=os.waitpid):
    held = folder / "held"  # the parent waits for a core before it looks who has ended, until one has
    if held.exists():
        held.unlink()
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    return waitpid(pid, options)

os.fork = fork
os.waitpid = waitpid
bound = socket.create_server(("127.0.0.1", 0))
tell("port", bound.getsockname()[1])
control = socket.create_server(("127.0.0.1", 0))
tell("control", control.getsockname()[1])
path = socket.socket(socket.AF_UNIX)
path.bind(str(folder / "data"))
inherited = InheritedSockets()
if (folder / "before").exists():
    inherited.taken = Predecessor(socket.socket(socket.AF_UNIX), os.getppid(), Offer())
    inherited.taken.connection.connect(str(folder / "before"))
sys.exit(Parent(2, [bound, path], control, body, tell, inherited, NextGateway(folder / "nobody", tell)).run())
"""
NAMES = ("decider-0", "relay-1", "relay-2")
WITHIN = 240.0  # seconds for whatever is waited for: of a busy core an idle process gets milliseconds in ten seconds


class Family:
    """The parent of PROGRAM, and its children as they have told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.child = Child("parent", [sys.executable, "-c", PROGRAM, str(folder)], folder / "log")

    def pids(self, name: str) -> list[int]:
        """Its processes, the one of now last."""
        return [int(pid) for pid in re.findall(rf"^{name} (\d+) ", self.child.output(), re.MULTILINE)]

    def wait(self, name: str, lives: int) -> int:
        """The process of its so-manieth life."""
        assert until(lambda: len(self.pids(name)) >= lives, WITHIN) is not None, self.child.output()
        return self.pids(name)[lives - 1]

    def said(self, words: str) -> bool:
        return until(lambda: words in self.child.output(), WITHIN) is not None


def refuses(port: int) -> bool:
    """Whether no process listens there."""
    with socket.socket() as asked:
        asked.settimeout(1.0)  # of one that nobody accepts from
        return asked.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


@contextlib.contextmanager
def taking_over(folder: Path) -> Iterator[tuple[Family, socket.socket]]:
    """One that is to take over, and the gateway before as it sees that one."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "before"))
        listening.listen()
        listening.settimeout(WITHIN)
        family = Family(folder)
        try:
            before, _ = listening.accept()
            with before:
                before.settimeout(WITHIN)
                yield family, before
        finally:
            family.child.kill()


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    """One whose members all serve: before that, a killed decider would end them all."""
    made = Family(tmp_path)
    try:
        assert all(made.said(f"{name} has begun") for name in NAMES), made.child.output()
        yield made
    finally:
        made.child.kill()


@pytest.mark.parametrize("name", ["decider-0", "relay-2"])
def test_who_is_killed_is_replaced_and_nobody_else(family: Family, name: str) -> None:
    before = {each: family.wait(each, 1) for each in NAMES}
    os.kill(before[name], signal.SIGKILL)
    family.wait(name, 2)
    assert family.said("was killed by signal 9: another is started")
    assert [each for each in NAMES if len(family.pids(each)) > 1] == [name]
    assert len(set(re.findall(r"\d+ (-?\d+) \[", family.child.output()))) == 1, "one key of hashes"


@pytest.mark.parametrize("name", ["decider-0", "relay-2"])
def test_a_machine_without_room_for_a_process_ends_nobody_else(family: Family, name: str) -> None:
    others = {each: family.pids(each) for each in NAMES if each != name}
    room = family.folder / "no-room"
    room.touch()
    os.kill(family.wait(name, 1), signal.SIGKILL)
    assert family.said(f"no {name.partition('-')[0]} can be started: [Errno 11] Resource temporarily unavailable")
    room.unlink()
    family.wait(name, 2)
    assert {each: family.pids(each) for each in others} == others


def test_who_could_not_be_started_before_a_hand_over_is_not_started_after_it(family: Family) -> None:
    (family.folder / "no-room").touch()
    os.kill(family.wait("relay-2", 1), signal.SIGKILL)
    assert family.said("no relay can be started")
    (family.folder / "hands-over").touch()
    assert family.said("decider-0 ends")
    (family.folder / "no-room").unlink()
    assert family.child.process.wait(WITHIN) == 0, "and those that the decider has not told to end do not stay"
    assert family.said("relay-1 ends")
    assert len(family.pids("relay-2")) == 1


def test_the_last_words_of_one_that_has_ended_are_heard_before_its_end_is_judged(family: Family) -> None:
    """Else a second decider would serve beside the gateway that has the sockets."""
    held = family.folder / "held"
    held.touch()
    assert until(lambda: not held.exists(), WITHIN) is not None
    (family.folder / "hands-over").touch()
    ended = until(lambda: family.child.process.poll() == 0 or len(family.pids("decider-0")) > 1, WITHIN)
    assert ended is not None
    assert len(family.pids("decider-0")) == 1, family.child.output()


def test_who_is_stopped_is_found(family: Family) -> None:
    pid = family.wait("relay-1", 1)
    os.kill(pid, signal.SIGSTOP)
    assert family.said(f"relay 1 (pid {pid}) was stopped: it is killed")
    family.wait("relay-1", 2)


def test_who_gives_no_sign_of_life_is_found(family: Family) -> None:
    pid = family.wait("relay-1", 1)
    (family.folder / f"relay-1-{pid}-hangs").touch()
    assert family.said(f"relay 1 (pid {pid}) hangs: it is killed")
    family.wait("relay-1", 2)


def test_who_runs_for_ever_is_found(family: Family) -> None:
    pid = family.wait("relay-1", 1)
    (family.folder / f"relay-1-{pid}-loops").touch()
    assert family.said(f"relay 1 (pid {pid}) hangs: it is killed")
    family.wait("relay-1", 2)


def test_who_waits_for_a_core_is_not_taken_for_one_that_hangs(family: Family) -> None:
    pid = family.wait("relay-1", 1)
    (family.folder / f"relay-1-{pid}-starves").touch()
    assert family.said(f"{pid} has a core again")
    assert "hangs" not in family.child.output()
    assert family.pids("relay-1") == [pid]


def test_a_new_decider_is_told_who_lives(family: Family) -> None:
    assert re.search(r"^decider-0 \d+ -?\d+ \[\]$", family.child.output(), re.MULTILINE)
    os.kill(family.pids("decider-0")[0], signal.SIGKILL)
    family.wait("decider-0", 2)
    assert re.search(r"^decider-0 \d+ -?\d+ \[1, 2\]$", family.child.output(), re.MULTILINE)


def test_one_that_cannot_start_ends_all_with_its_status(tmp_path: Path) -> None:
    (tmp_path / "relay-2-cannot").touch()
    family = Family(tmp_path)
    assert family.child.process.wait(WITHIN) == 2
    assert not family.child.group()


def test_one_that_gives_up_leaves_the_path_to_the_gateway_that_it_was_to_take_over(tmp_path: Path) -> None:
    (tmp_path / "decider-0-cannot").touch()
    with taking_over(tmp_path) as (family, _):
        assert family.child.process.wait(WITHIN) == 2
        assert (tmp_path / "data").exists()


@pytest.mark.parametrize(("signs", "stays"), [(READY, False), (READY + OFFERED, True)])
def test_the_path_stays_for_another_that_may_serve_with_the_socket(tmp_path: Path, signs: bytes, stays: bool) -> None:
    (tmp_path / "decider-0-begins-with").write_bytes(signs)
    family = Family(tmp_path)
    try:
        assert all(family.said(f"{name} has begun") for name in NAMES), family.child.output()
        family.child.process.send_signal(signal.SIGTERM)
        assert family.child.process.wait(WITHIN) == 0
        assert (tmp_path / "data").exists() is stays
    finally:
        family.child.kill()


def test_one_that_has_handed_over_keeps_no_control_port_while_its_streams_last(tmp_path: Path) -> None:
    """No other gateway could listen there if the successor ended, and clients that connect would hang."""
    (tmp_path / "relay-1-stays").touch()
    family = Family(tmp_path)
    try:
        assert all(family.said(f"{name} has begun") for name in NAMES), family.child.output()
        found = re.search(r"^control (\d+)", family.child.output(), re.MULTILINE)
        assert found is not None
        (tmp_path / "hands-over").touch()
        assert family.said("decider-0 ends")
        assert until(lambda: refuses(int(found[1])), 20.0) is not None
        assert family.child.process.poll() is None
        (tmp_path / "relay-1-stays").unlink()
        assert family.child.process.wait(WITHIN) == 0
    finally:
        family.child.kill()


def test_one_that_is_killed_before_it_serves_is_replaced_where_nobody_else_is_left(tmp_path: Path) -> None:
    """The gateway that it takes over has been told to stop."""
    (tmp_path / "decider-0-begins-with").write_bytes(TAKE)
    with taking_over(tmp_path) as (family, before):
        assert before.recv(4096) == b'{"decider":""}\n'
        os.kill(family.wait("decider-0", 1), signal.SIGKILL)
        family.wait("decider-0", 2)
        family.wait("relay-1", 1)  # it was forked before, but may tell so later
        assert len(family.pids("relay-1")) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_gateway_that_has_given_up_does_not_tell_the_one_before_to_stop(tmp_path: Path, name: str) -> None:
    (tmp_path / "decider-0-begins-with").write_bytes(ALIVE)
    (tmp_path / f"{name}-begins-with").write_bytes(ALIVE)
    with taking_over(tmp_path) as (family, before):
        for each in NAMES:
            assert family.said(f"{each} has begun")
        parent = family.child.process.pid
        os.kill(parent, signal.SIGSTOP)  # it finds the death and the signs of the others in one turn
        os.kill(family.wait(name, 1), signal.SIGKILL)
        assert until(lambda: state(family.wait(name, 1)) == "Z", WITHIN) is not None
        (tmp_path / "takes").touch()
        assert family.said("can take over")
        os.kill(parent, signal.SIGCONT)
        assert family.child.process.wait(WITHIN) == 1
        assert before.recv(4096) == b""
        assert not family.child.group()
        assert "ends" not in family.child.output(), "there is nothing to drain"


def test_a_gateway_that_is_told_to_end_before_it_serves_leaves_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "decider-0-begins-with").write_bytes(ALIVE)
    with taking_over(tmp_path) as (family, before):
        assert family.said("decider-0 has begun")
        assert family.child.stop(60.0) == 0
        assert before.recv(4096) == b""
        assert not family.child.group()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_is_killed_before_it_serves_ends_all_otherwise(tmp_path: Path, number: int) -> None:
    (tmp_path / "decider-0-begins-with").write_bytes(ALIVE)
    family = Family(tmp_path)
    assert family.said("decider-0 has begun")
    pid = family.wait("decider-0", 1)
    os.kill(pid, number)
    assert family.child.process.wait(WITHIN) == 1
    said = family.child.output()
    assert f"decider (pid {pid}) was killed by signal 9 before it served: the gateway stops\n" in said
    assert "another" not in said
    assert not family.child.group()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2])
@pytest.mark.parametrize("name", NAMES)
def test_a_child_that_is_told_to_end_by_anybody_but_its_parent_stays(
    family: Family, name: str, number: signal.Signals
) -> None:
    os.kill(family.wait(name, 1), number)
    os.kill(family.wait("relay-1" if name != "relay-1" else "relay-2", 1), signal.SIGKILL)  # a turn of the parent's
    assert family.said("was killed by signal 9: another is started")
    assert "ends" not in family.child.output()
    assert len(family.pids(name)) == 1


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGUSR1, signal.SIGALRM])
@pytest.mark.parametrize("name", ["decider-0", "relay-2"])
def test_a_child_that_another_signal_has_ended_is_replaced(family: Family, name: str, number: signal.Signals) -> None:
    os.kill(family.wait(name, 1), number)
    family.wait(name, 2)
    assert family.said(f"was killed by signal {number.value}: another is started")


def test_the_first_signal_is_for_the_decider_and_relays_end_after_it(family: Family) -> None:
    family.child.process.send_signal(signal.SIGTERM)
    assert family.child.process.wait(WITHIN) == 0
    ends = re.findall(r"^(\S+) ends$", family.child.output(), re.MULTILINE)
    assert ends[0] == "decider-0"
    assert sorted(ends) == sorted(NAMES)
