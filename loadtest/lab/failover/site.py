"""Site of a failover: simulated engines, gateways of several processes, and a store where they are several machines."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from loadtest.lab.operate.valkey import Valkey
from loadtest.processes import Child, ChildError, Gateway, free_port, get, until

ENGINES, SLOTS = 2, 4  # calls at once of each engine: few, so that two cores are enough for all of it
POLICY = "fleet: {{poll: 100ms, health: 200ms, engines: [{}]}}\ntimeouts: {{drain: 60s}}\n"
ENGINE = f"{{{{url: '{{}}', max_concurrency: {SLOTS}}}}}"  # a bound that is not learned
TOKEN = "failover-on-one-machine"  # noqa: S105 # of members on loopback
ROUNDS = 12  # of signals
JOINED = 30.0  # seconds for machines to know each other


class GatewayMachine:
    """Gateway of several processes. `cluster`: the field of its policy; empty: it is alone."""

    def __init__(self, folder: Path, engines: list[str], relays: int, cluster: str = "") -> None:
        folder.mkdir()
        policy = folder / "policy.yaml"
        policy.write_text(POLICY.format(", ".join(map(ENGINE.format, engines))) + cluster)
        words = [*("--workers", str(relays), "--policy", str(policy), "--log", "none")]
        self.member = ""
        if cluster:
            (folder / "token").write_text(TOKEN)
            (folder / "token").chmod(0o600)
            self.member = f"127.0.0.1:{free_port()}"
            words += ["--advertise", self.member]
        self._relays = relays
        self.gateway = Gateway(folder / "gateway.log", *words)
        self.url, self.control = self.gateway.url, self.gateway.control

    def asked(self, path: str) -> Any:
        """JSON of the control port, as long as somebody answers there; else None."""
        try:
            return json.loads(get(self.control + path, timeout=1.0)[1])
        except (OSError, http.client.HTTPException, ValueError):
            return None

    def pids(self, role: str) -> list[int]:
        """The processes of a role; none while nobody answers."""
        found = self.asked("/processes") or {"processes": []}
        return [each["pid"] for each in found["processes"] if each["role"] == role]

    def ready(self) -> bool:
        """Whether `/readyz` says so."""
        try:
            return get(f"{self.control}/readyz", timeout=1.0)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def whole(self) -> bool:
        """Whether a decider and all relays are there; beside them, those of a gateway that was taken over."""
        return len(self.pids("decider")) == 1 and len(self.pids("relay")) >= self._relays

    def in_flight(self) -> int:
        """Calls that hold memory of an engine, as who decides knows them; -1 while nobody answers."""
        fleet = self.asked("/fleet")
        return -1 if fleet is None else sum(engine["in_flight"] for engine in fleet["engines"])

    def held(self) -> int:
        """Tokens promised on all engines; -1 while nobody answers."""
        fleet = self.asked("/fleet")
        return -1 if fleet is None else sum(engine["held_tokens"] for engine in fleet["engines"])

    def grants(self) -> bool:
        """Whether it is the one of its cluster that decides."""
        return bool((self.asked("/cluster") or {}).get("granting"))

    def signal(self, number: signal.Signals) -> None:
        """Every process of it, at once."""
        parent = self.gateway.child.pid
        for pid in (parent, *children(parent)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.gateway.child.kill()


class FailoverSite:
    """Engines at `urls`, and one machine, or several of a cluster. `seed`: of what faults draw; `rounds`: of signals.
    Raises ChildError, and NoProgram."""

    def __init__(self, folder: Path, *, relays: int, machines: int = 1, seed: int = 0, rounds: int = ROUNDS) -> None:
        self.rounds = rounds
        self.rng = random.Random(seed)  # noqa: S311 # chances, no secrets
        self.machines: list[GatewayMachine] = []
        self._store: Valkey | None = None
        self._engines = [self._engine(folder, number) for number in range(ENGINES)]
        try:
            urls = self.urls = [child.line(r"^ready (\S+)", 30.0) for child in self._engines]
            if machines == 1:
                self.machines.append(GatewayMachine(folder / "machine", urls, relays))
                return
            self._store = Valkey(folder / "valkey.log", free_port())
            policy = f"cluster: {{url: '{self._store.url}', name: failover, token_file: token}}\n"
            for number in range(machines):
                self.machines.append(GatewayMachine(folder / f"machine-{number}", urls, relays, policy))
            if until(self._joined, JOINED) is None:
                raise ChildError(f"{machines} machines of a cluster did not get to know each other")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> FailoverSite:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _engine(folder: Path, number: int) -> Child:
        argv = [sys.executable, "-m", "loadtest.engine", "--profile", "h100-8b", "--seed", str(number)]
        return Child(f"engine-{number}", argv, folder / f"engine-{number}.log")

    def _joined(self) -> bool:
        """Whether one grants, and could be followed by any other."""
        granting = [each for each in self.machines if each.grants()]
        others = {each.member for each in self.machines if each not in granting}
        return len(granting) == 1 and others <= set((granting[0].asked("/cluster") or {}).get("candidates", ()))

    @property
    def leader(self) -> GatewayMachine:
        """The machine that grants; of one, that one."""
        return next((each for each in self.machines if each.grants()), self.machines[0])

    @property
    def followers(self) -> list[GatewayMachine]:
        """The machines whose clients are asked: those that do not lead; of one, that one."""
        leader = self.leader
        return [each for each in self.machines if each is not leader] or [leader]

    @property
    def served(self) -> GatewayMachine:
        """The first of them."""
        return self.followers[0]

    def close(self) -> None:
        for machine in self.machines:
            machine.close()
        for child in (*self._engines, *([] if self._store is None else [self._store.child])):
            child.kill()


def children(pid: int) -> list[int]:
    """Child processes of a process, from the kernel."""
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(each) for each in found.read_text().split()] if found.exists() else []


def stands(pid: int) -> bool:
    """Whether a process is stopped; one that is gone is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except FileNotFoundError:
        return False


def client_ports(pid: int) -> set[int]:
    """Ports of the clients whose connections a process has, on IPv4. There is none of a process that is gone."""
    links = set()
    with contextlib.suppress(FileNotFoundError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                links.add(str(descriptor.readlink()))
    ports = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[9]}]" in links:
            ports.add(int(fields[2].rpartition(":")[2], 16))
    return ports - {0}  # of listening sockets
