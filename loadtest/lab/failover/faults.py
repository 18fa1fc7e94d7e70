"""Faults of a failover: who is killed or stopped, and by what it is seen that others do its work."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from loadtest.lab.failover.signals import send
from loadtest.lab.failover.site import FailoverSite, GatewayMachine, children, client_ports, stands
from loadtest.processes import ChildError, until

ONE, ACROSS = 1.0, 4.0  # seconds without grants: the targets on one machine, and across machines
AGAIN = 6.0  # the same, where processes end again and again: they are started up to 5 s later
HOLDS = 1.0  # seconds until nothing is held that a dead relay's calls held
STARTED = 20.0  # seconds for a gateway to start

KILL, STOP = signal.SIGKILL, signal.SIGSTOP


class Struck(msgspec.Struct, frozen=True):
    """A fault that has happened, `at` a time of `time.monotonic`. `mended`: whether all its work is done by others now.
    `own`: ports of the clients whose connections went with it."""

    at: float
    mended: Callable[[], bool]
    own: frozenset[int] = frozenset()


class FailoverFault(msgspec.Struct, frozen=True, kw_only=True):
    """`strike` makes it happen. `within`: seconds without grants that are aimed at; `exact_within`: the same until the
    ledger is exact again, None: no aim. `machines`: that it needs; of a cluster where it is more than one."""

    title: str
    strike: Callable[[FailoverSite], Struck]
    within: float = ONE
    exact_within: float | None = None
    machines: int = 1


def _relay(number: signal.Signals) -> Callable[[FailoverSite], Struck]:
    def strike(site: FailoverSite) -> Struck:
        machine = site.served
        pid, parent = machine.pids("relay")[0], machine.pids("parent")[0]
        # Both stand still while the relay's connections are read; the parent would kill who stands still.
        os.kill(parent, STOP)
        os.kill(pid, STOP)
        until(lambda: stands(pid), 1.0, every=0.001)
        own, at = frozenset(client_ports(pid)), time.monotonic()
        os.kill(pid, number)
        os.kill(parent, signal.SIGCONT)
        return Struck(at, _replaced(machine, "relay", pid), own)

    return strike


def _decider(number: signal.Signals) -> Callable[[FailoverSite], Struck]:
    def strike(site: FailoverSite) -> Struck:
        machine = site.leader
        pid = machine.pids("decider")[0]
        at = time.monotonic()
        os.kill(pid, number)
        return Struck(at, _replaced(machine, "decider", pid))

    return strike


def _machine(number: signal.Signals) -> Callable[[FailoverSite], Struck]:
    def strike(site: FailoverSite) -> Struck:
        leader = site.leader
        others = [machine for machine in site.machines if machine is not leader]
        at = time.monotonic()
        leader.signal(number)
        return Struck(at, lambda: any(machine.grants() for machine in others))

    return strike


def _upgrade(site: FailoverSite) -> Struck:
    return _upgraded(site.served)


def _leader_upgrade(site: FailoverSite) -> Struck:
    machine = site.leader
    struck = _upgraded(machine)
    return Struck(struck.at, lambda: struck.mended() and machine.grants())


def _upgraded(machine: GatewayMachine) -> Struck:
    before = machine.pids("parent")
    at = time.monotonic()
    os.kill(before[0], signal.SIGUSR2)
    return Struck(at, lambda: machine.pids("parent") != before and machine.whole())


def _successor_struck(number: signal.Signals) -> Callable[[FailoverSite], Struck]:
    """The successor's decider as soon as it is forked, before it has taken over."""

    def strike(site: FailoverSite) -> Struck:
        machine = site.served
        parent = machine.pids("parent")[0]
        pid = _child_of(_successor(parent))
        at = time.monotonic()
        os.kill(pid, number)
        return Struck(at, _replaced(machine, "decider", pid))

    return strike


def _upgraded_struck(site: FailoverSite) -> Struck:
    machine = site.served
    struck = _upgrade(site)
    if until(struck.mended, STARTED) is None:
        raise ChildError("no successor took over")
    pid = machine.pids("decider")[0]
    at = time.monotonic()
    os.kill(pid, KILL)
    return Struck(at, _replaced(machine, "decider", pid))


def _successor(parent: int) -> int:
    """The process that SIGUSR2 has this one start to take over."""
    before = set(children(parent))
    os.kill(parent, signal.SIGUSR2)
    found: list[int] = []

    def there() -> bool:
        found[:] = [pid for pid in children(parent) if pid not in before]
        return bool(found)

    if until(there, STARTED, every=0.005) is None:
        raise ChildError("no successor was started")
    return found[0]


def _child_of(pid: int) -> int:
    """The first child of a process, waited for: of a parent that is its decider."""
    if until(lambda: bool(children(pid)), STARTED, every=0.005) is None:
        raise ChildError("the successor has no decider")
    return children(pid)[0]


def _signals(site: FailoverSite) -> Struck:
    at = time.monotonic()
    own = send(site)
    return Struck(at, lambda: True, own)


def _replaced(machine: GatewayMachine, role: str, pid: int) -> Callable[[], bool]:
    return lambda: not Path(f"/proc/{pid}").exists() and machine.whole() and pid not in machine.pids(role)


FAULTS = {
    "relay-kill": FailoverFault(
        title="SIGKILL of a relay",
        strike=_relay(KILL),
        exact_within=HOLDS,
    ),
    "relay-stop": FailoverFault(
        title="SIGSTOP of a relay",
        strike=_relay(STOP),
        exact_within=HOLDS,
    ),
    "decider-kill": FailoverFault(
        title="SIGKILL of the decider",
        strike=_decider(KILL),
    ),
    "decider-stop": FailoverFault(
        title="SIGSTOP of the decider",
        strike=_decider(STOP),
    ),
    "upgrade": FailoverFault(
        title="an upgrade by SIGUSR2, no kill",
        strike=_upgrade,
    ),
    "upgrade-kill": FailoverFault(
        title="SIGKILL of the successor's decider as it starts", strike=_successor_struck(KILL)
    ),
    "upgrade-stop": FailoverFault(
        title="SIGSTOP of the successor's decider as it starts", strike=_successor_struck(STOP)
    ),
    "upgraded-kill": FailoverFault(
        title="SIGKILL of the successor's decider once it serves",
        strike=_upgraded_struck,
    ),
    "signals": FailoverFault(title="signals to processes at random", strike=_signals, within=AGAIN),
    "leader-kill": FailoverFault(
        title="SIGKILL of the leading machine", strike=_machine(KILL), within=ACROSS, machines=2
    ),
    "leader-stop": FailoverFault(
        title="SIGSTOP of the leading machine", strike=_machine(STOP), within=ACROSS, machines=2
    ),
    "leader-of-three-kill": FailoverFault(
        title="SIGKILL of the leading machine of three", strike=_machine(KILL), within=ACROSS, machines=3
    ),
    "leader-upgrade": FailoverFault(
        title="an upgrade of the leading machine by SIGUSR2, no kill", strike=_leader_upgrade, machines=2
    ),
    "leader-decider-kill": FailoverFault(
        title="SIGKILL of the leading machine's decider", strike=_decider(KILL), machines=2
    ),
}
QUICK = ("relay-kill", "decider-kill", "upgrade-kill", "leader-kill")
