"""Several machines on this one: gateways on ports of loopback, one simulated engine, and a real Valkey."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gateway.serve.cluster.hashes import VARIABLE, key_of
from loadtest.processes import Gateway, free_port, get, until
from tests.cluster.valkey import Valkey
from tests.e2e.children import SimEngine
from tests.programs import VALKEY, required

SHOWN = "sixteen-characters-or-more"


class Machine:
    """One gateway of two relays. `url`: the store, as this machine reaches it. `sidecars`: the report token; empty: it
    takes no reports. `hashes`: it has its cluster's key of hashes already, else it starts itself again with that."""

    def __init__(self, site: Site, number: int, url: str, *, shown: str = SHOWN, name: str = "prod", more: str = "",
                 advertise: str = "", sidecars: str = "", policy: str = "", ready: bool = True,
                 hashes: bool = True) -> None:  # fmt: skip
        self.member = advertise or f"127.0.0.1:{free_port()}"
        folder = site.folder / f"machine-{number}"
        folder.mkdir(exist_ok=True)
        (folder / "token").write_text(shown)
        (folder / "token").chmod(0o600)
        (folder / "report").write_text(sidecars)
        (folder / "report").chmod(0o600)
        file = folder / "policy.yaml"
        file.write_text(
            f"fleet: {{poll: 100ms, health: 20s{', sidecars: {token_file: report}' if sidecars else ''}}}\n"
            f"budget: {{max_concurrency: 4}}\n{policy}"
            f"cluster: {{url: '{url}', name: {name}, token_file: token{more}}}\n"
        )
        words = ("--workers", "2", "--policy", str(file), "--engine", site.engine.url, "--log", "none")
        env = {**os.environ, VARIABLE: key_of(name, shown)} if hashes else None
        self.gateway = Gateway(folder / "gateway.log", *words, "--advertise", self.member, ready=ready, env=env)

    @property
    def output(self) -> str:
        return self.gateway.child.output()

    def cluster(self) -> dict[str, Any]:
        """The cluster as it knows it; {} where it does not answer."""
        try:
            found: dict[str, Any] = json.loads(get(f"{self.gateway.control}/cluster", timeout=60.0)[1])
        except (OSError, ValueError):
            return {}
        return found

    def grants(self) -> bool:
        return bool(self.cluster().get("granting"))

    def says(self, words: str, within: float = 60.0) -> None:
        """Wait for a line in its log."""
        self.gateway.child.says(words, within)

    def signal(self, number: signal.Signals) -> None:
        """To every process of it, at once."""
        self.gateway.child.signal(number)
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def pids(self) -> list[int]:
        """The parent and its children, from the kernel: they may be stopped."""
        parent = self.gateway.child.pid
        children = Path(f"/proc/{parent}/task/{parent}/children")
        return [parent, *map(int, children.read_text().split())] if children.exists() else [parent]


class Site:
    """An engine, a store, and machines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = SimEngine(folder / "engine.log")
        self.store = Valkey(folder / "valkey.log", free_port())
        self.machines: list[Machine] = []

    def machine(self, url: str = "", **more: Any) -> Machine:
        """Another machine, ready."""
        made = Machine(self, len(self.machines) + 1, url or self.store.url, **more)
        self.machines.append(made)
        return made

    def leader(self, within: float = 60.0) -> Machine:
        """The machine that grants, waited for: one that was held up has no lease until its next turn or votes."""
        found: list[Machine] = []

        def there() -> bool:
            found[:] = [each for each in self.machines if each.grants()]
            return len(found) == 1

        assert until(there, within) is not None, "\n\n".join(each.output for each in self.machines)
        return found[0]

    def others(self, leader: Machine) -> list[Machine]:
        return [each for each in self.machines if each is not leader]

    def close(self) -> None:
        for machine in self.machines:
            for pid in machine.pids() if machine.gateway.child.alive else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            machine.gateway.child.kill()
        self.engine.child.stop()
        self.store.child.kill()


@contextlib.contextmanager
def site(folder: Path) -> Iterator[Site]:
    required(VALKEY)
    made = Site(folder)
    try:
        yield made
        for machine in made.machines:
            assert "Traceback" not in machine.output, machine.output
    finally:
        made.close()


def known(made: Site) -> None:
    """Wait until the leader knows the other machine, which may then be elected at once."""
    leader = made.leader()
    (other,) = made.others(leader)
    assert until(lambda: leader.cluster().get("candidates") == [other.member], 60.0) is not None, leader.output
