"""Signals of a failover: to each process of a gateway and to all of its children, in random order, one after another.

The parent is sent what it lives on with. Its children are sent everything: by some of it they end, by some they are
stopped, and some they ignore. After each round a decider and all relays have to be there, and no process beside them;
`/readyz` has to say 200; no engine may ever run more calls than its policy says.
"""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from pathlib import Path

from loadtest.lab.failover.site import SLOTS, FailoverSite, GatewayMachine, children, client_ports, stands
from loadtest.processes import ChildError, total, until

AGAIN = 15.0  # seconds for all to be there again; who ends again and again is started again up to 5 s later
STRIKES = 0.1  # seconds until who is to end has ended, or more: the parent looks twice in that time
APART = 0.3  # seconds between two rounds, at most
LIVES_ON = (signal.SIGHUP, signal.SIGPIPE)  # and SIGSTOP, SIGCONT in each round
SENT = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE),
    *(signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL),
)


def send(site: FailoverSite) -> frozenset[int]:
    """All rounds; the ports of the clients whose relays have ended. 0 is among them: each try of openai-python may have
    met such a relay, and where it gives up its port is not known. Raises ChildError, with what was sent."""
    machine, rng = site.served, site.rng
    own = {0}
    for number in range(site.rounds):
        told, ports = _round(machine, rng)
        time.sleep(STRIKES)
        if until(lambda: _serves(site, machine), AGAIN) is None:
            raise ChildError(f"round {number}, {told}: not all are there again\n{machine.gateway.child.output()}")
        for pid, of_relay in ports.items():
            if not Path(f"/proc/{pid}").exists():
                own |= of_relay
        time.sleep(rng.uniform(0.0, APART))
    return frozenset(own)


def _round(machine: GatewayMachine, rng: random.Random) -> tuple[str, dict[int, set[int]]]:
    """Send to some children one signal, or to each its own; what was sent, and the ports of each one's clients."""
    parent, *_ = machine.pids("parent")
    born = children(parent)
    struck = rng.sample(born, rng.choice((1, 1, len(born))))
    same = rng.choice(SENT)
    orders = [(pid, rng.choice((same, rng.choice(SENT)))) for pid in struck]
    orders.insert(rng.randrange(len(orders) + 1), (parent, rng.choice(LIVES_ON)))
    # All stand still while the connections are read. The parent would kill a child that stands still, and does so with
    # those that do not go on before it.
    for pid in (parent, *struck):
        os.kill(pid, signal.SIGSTOP)
        until(partial(stands, pid), 1.0, every=0.001)
    ports = {pid: client_ports(pid) for pid in struck}
    for pid, number in orders:
        os.kill(pid, number)
    for pid in [*(pid for pid, number in orders if pid != parent and number != signal.SIGSTOP), parent]:
        os.kill(pid, signal.SIGCONT)
    return ", ".join(f"{number.name} to {pid}" for pid, number in orders), ports


def _serves(site: FailoverSite, machine: GatewayMachine) -> bool:
    """Whether all processes of a machine are there, and none beside them. Raises ChildError where an engine runs too
    many calls."""
    for url in site.urls:
        running = total(f"{url}/metrics", "vllm:num_requests_running")
        if running > SLOTS:
            raise ChildError(f"{url} runs {running:g} calls, and may run {SLOTS}")
    if not machine.whole() or not machine.ready():
        return False
    named = {pid for role in ("decider", "relay") for pid in machine.pids(role)}
    return named == set(children(machine.pids("parent")[0]))
