"""Decider of one machine in a simulation with relays: one life after another, each with the last one's checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.core.policy.policy import Policy
from gateway.decider.loading import Configuration
from gateway.serve.starting import ApplyError
from loadtest.lab.dst.case import DeciderFault, MemberFault
from loadtest.lab.dst.relays.parts import Decider, Relay
from loadtest.simulate.inprocess import GatewayTarget
from loadtest.simulate.relays import hub_of

if TYPE_CHECKING:
    from loadtest.lab.dst.relays.several_processes import SeveralProcesses


class OneDecider:
    """Decider that every relay reaches; `Members` is the same of a cluster."""

    def __init__(self, processes: SeveralProcesses) -> None:
        self.processes = processes
        self.deciders: list[Decider] = []
        self._state: tuple[float, bytes] | None = None  # the last checkpoint, and when it was taken

    def begin(self) -> GatewayTarget:
        """Start the next decider."""
        processes = self.processes
        epoch = processes.epoch()
        target = processes.target()
        living = {relay.number: relay.pid for relay in processes.relays if relay.dead_at < 0.0}
        hub = hub_of(target.gateway, epoch, living, lives=self._lives)
        decider = Decider(target.gateway, hub)
        if self._state is not None:
            at, state = self._state
            target.gateway.checkpoints.restore(state, processes.loop.time() - at)
            processes.laws.restored(target.gateway, state)
        self.deciders.append(decider)
        processes.laws.begins(decider)
        processes.tell(f"a decider of epoch {epoch} begins")
        return target

    def _lives(self, pid: int) -> bool:
        return any(relay.pid == pid and relay.dead_at < 0.0 for relay in self.processes.relays)

    def machine(self, relay: int) -> str:
        """Machine of a relay of this number."""
        return ""

    @property
    def _leader(self) -> Decider | None:
        decider = self.deciders[-1] if self.deciders else None
        return None if decider is None or decider.dead or decider.hangs else decider

    def reached(self, relay: Relay) -> Decider | None:
        """The decider that a relay reaches; None: there is none."""
        return self._leader

    def untroubled(self, one: str, other: str) -> bool:
        """Return whether both are the one machine."""
        return one == other

    def look(self) -> None:
        """Take a checkpoint."""
        decider = self._leader
        if decider is not None and decider.hub.complete:
            self._state = self.processes.loop.time(), decider.gateway.checkpoints.take(decider.hub.ungranted)

    def apply(self, policy: Policy) -> None:
        """A reload."""
        decider = self._leader
        if decider is not None:
            try:
                decider.gateway.apply(Configuration(policy, {}))
            except ApplyError as error:
                self.processes.found(f"a reload failed: {error}")
            decider.hub.apply(decider.gateway.current.snapshot, b"a secret of cache salts")

    def befalls(self, event: DeciderFault) -> None:
        """Kill it, or let it hang until it is killed."""
        decider = self._leader
        if decider is None:
            return
        if event.what == "hang":
            decider.hangs = True
            for link in decider.links.values():
                link.hold()
            self.processes.loop.call_later(event.seconds, self._kill, decider, 0.05)
        else:
            self._kill(decider, event.seconds)

    def befalls_member(self, event: MemberFault) -> None:
        """Do nothing, because without a cluster no member can fail."""

    def _kill(self, decider: Decider, seconds: float) -> None:
        if decider.dead:
            return
        decider.dead = True
        self.processes.soon(decider.aclose())
        if not self.processes.world.wrong:
            self.processes.loop.call_later(seconds, self.begin)

    async def aclose(self) -> None:
        """End all deciders."""
        for decider in self.deciders:
            if not decider.dead:
                await decider.aclose()
