"""Intake of sidecars' reports: updates the fleet, wakes waiting calls, and answers with the demand for each model.

`core/sidecars` decides what a report changes. Engines join and leave through `Members`, which owns everything that an
engine needs. One timer finds sidecars that have become stale. Nothing here runs for each call.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Protocol

from gateway.core.policy.policy import SidecarsPolicy
from gateway.core.sidecars.sidecar import STALE, Member
from gateway.core.sidecars.sidecars import Changes, UntrustedSidecar
from gateway.decider.dispatch import Dispatch
from gateway.decider.known_models import KnownModels
from gateway.shared.protocol import SOCKETS_MARK, ClusterMember, DemandReport, capacity_report
from gateway.shared.tasks import wait_until
from gateway.shared.tokens import AcceptedTokens, Tokens

RECALLED = STALE - 1.0  # seconds that calls wait for a model of before: then they are told to come back, and not 404
AGAIN = 60.0  # seconds between two looks at sidecars that are all silent
FOREIGN = stat.S_IWGRP | stat.S_IRWXO  # permissions of other users that a sidecar's folder must not give


def socket_refusal(path: str) -> str:
    """Return the reason why calls may not be sent to the socket at `path`; empty: they may.

    Every prompt goes to the socket that a sidecar names. A path alone proves nothing, since Docker, agents and message
    buses listen on sockets too. So its folder must hold a sidecar's mark file, only its owner may write there, and the
    owner must be the user of this process, or root.
    """
    folder = os.path.dirname(path)
    if os.path.normpath(path) != path or os.path.realpath(folder) != folder:
        return "its path is not a plain one: no links, no . or .."
    try:
        seen, mark = os.lstat(folder), os.lstat(Path(folder) / SOCKETS_MARK)
    except PermissionError:
        return "its folder is closed to the gateway's user: run gateway and sidecar as one user"
    except OSError:
        return f"its folder is none that a sidecar has made for engines: {SOCKETS_MARK} is not there"
    users = (os.geteuid(), 0)
    if seen.st_uid not in users or mark.st_uid != seen.st_uid or not stat.S_ISREG(mark.st_mode):
        return "its folder belongs to another user than the gateway's"
    return "its folder is open to other users: it should be 0700" if seen.st_mode & FOREIGN else ""


class Members(Protocol):
    """The engines of the fleet, added and removed. `leave` may name an engine that calls still run on."""

    def join(self, member: Member) -> None: ...

    def update(self, member: Member) -> None: ...

    def leave(self, id: str) -> None: ...


class ReportIntake:
    """Takes reports, and applies them to the registry and the fleet.

    `say` takes lines for the operator. `heard` is called after each report, and when a sidecar becomes stale, since
    predictions may change then. `socket_refusal`: see `core.sidecars.sidecars.Registry`.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        members: Members,
        heard: Callable[[], None],
        say: Callable[[str], None],
        *,
        socket_refusal: Callable[[str], str] = socket_refusal,
    ) -> None:
        self._dispatch = dispatch
        self._registry = dispatch.sidecars
        self._registry.socket_refusal = socket_refusal
        self.cluster: tuple[str, Callable[[], tuple[ClusterMember, ...]]] = ("", tuple)  # this member, and all
        self._members = members
        self._heard = heard
        self._say = say
        self._name = f"gateway-{secrets.token_hex(8)}"
        self._policy: SidecarsPolicy | None = None
        self._tokens = AcceptedTokens(())
        self._timer: asyncio.TimerHandle | None = None
        self._known: KnownModels | None = None
        self._forgets: asyncio.TimerHandle | None = None
        self._heard_now = asyncio.Event()  # pulses at each report

    def remember(self, known: KnownModels) -> None:
        """Remember models over restarts: calls for those of before wait for the first reports."""
        self._known = known
        self._registry.models.remembered = known.read()
        if self._registry.models.remembered:
            self._forgets = asyncio.get_running_loop().call_later(RECALLED, self._forget_remembered)

    def _forget_remembered(self) -> None:
        """Every sidecar that runs has reported by now."""
        self._registry.models.forget_remembered()
        self._pulse()

    def _pulse(self) -> None:
        self._heard_now.set()
        self._heard_now.clear()  # waiters are woken all the same

    async def reported(self, enough: Callable[[], object], within: float) -> None:
        """Wait until `enough` is true after some report; for `within` seconds at most."""
        await wait_until(enough, self._heard_now, within)

    def apply(self, policy: SidecarsPolicy | None, tokens: Tokens, taken: Container[str]) -> None:
        """Set the policy. `taken`: ids of engines that it names itself. With None no report is taken, and all engines
        of sidecars leave.
        """
        self._policy = policy
        self._tokens.renew(tokens)
        if policy is None:
            self._carry_out(self._registry.clear())
        else:
            now, secure = self._dispatch.clock(), policy.tls is not None
            for changes in self._registry.apply(policy.allow, taken, now, policy.copies, secure=secure):
                self._carry_out(changes)

    def admit(self, token: bytes | None) -> None:
        """Check the token of a sender. Raises UntrustedSidecar."""
        if self._policy is None:
            raise UntrustedSidecar("This gateway's policy has no fleet.sidecars: no sidecar is heard.")
        if not self._tokens:
            raise UntrustedSidecar("This gateway's policy has no fleet.sidecars.token_file: no sidecar is heard.")
        if token is None or not self._tokens.accepts(token):
            raise UntrustedSidecar(
                "A sidecar shows the token of fleet.sidecars.token_file: Authorization: Bearer TOKEN."
            )

    def report(self, body: bytes, *, local: bool) -> DemandReport:
        """Take a report, and return the demand. `local`: it came from this machine. Raises ProtocolError, RegistryFull,
        NameConflict.
        """
        report = capacity_report(body)
        registry, now = self._registry, self._dispatch.clock()
        before = registry.sidecars.get(report.sidecar)
        models = set() if before is None else {name for model in before.models.values() for name in model.served}
        changes = registry.take(report, now, local=local)
        if changes.dropped:
            if not changes.dropped.startswith("report "):  # it is another's, or its network is very slow
                self._say(f"sidecar {report.sidecar}: {changes.dropped} is not taken")
        else:
            self._carry_out(changes)
            self._news(models.union(name for model in report.models for name in model.served))
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(STALE, self._look)
            self._pulse()
        for model in dict.fromkeys(model.model for model in report.models):
            holders = registry.models.holders(model)
            line = registry.copies.step(model, holders, self._dispatch.estimates.longest_wait, now)
            if line:
                self._say(line)
        member, members = self.cluster
        return DemandReport(
            gateway=self._name,
            boot=report.boot,
            sequence=report.sequence,
            demands=registry.demands(
                report.sidecar, now, self._in_flight, self._dispatch.estimates.waiting, self._serving_of
            ),
            member=member,
            members=members(),
        )

    def close(self) -> None:
        """Cancel the timers."""
        for timer in (self._timer, self._forgets):
            if timer is not None:
                timer.cancel()

    def _carry_out(self, changes: Changes) -> None:
        for id in changes.leave:
            self._members.leave(id)
        for member in changes.join:
            self._members.join(member)
        for member in changes.update:
            self._members.update(member)
        for line in changes.log:
            self._say(line)
        if changes.expected and self._known is not None:
            # Until all have had time to report, what one had that has not yet is not forgotten.
            self._known.keep(self._registry.models.names | self._registry.models.remembered)
        if changes.expected:
            self._dispatch.fleet.expect(self._registry.cards(self._dispatch.clock()))

    def _news(self, models: Iterable[str]) -> None:
        """Let calls that wait for one of these models be considered again."""
        for model in models:
            self._dispatch.waiting.reconsider(model)
        self._heard()

    def _look(self) -> None:
        """Find sidecars that have become stale, and forget those silent for long. The models of the former are no
        longer to be had.
        """
        now, registry = self._dispatch.clock(), self._registry
        silent = [sidecar for sidecar in registry.sidecars.values() if sidecar.stale(now)]
        self._carry_out(registry.forget(now, self._serving))
        self._news({name for sidecar in silent for model in sidecar.models.values() for name in model.served})
        self._timer = None
        heard = [sidecar.reported_at for sidecar in registry.sidecars.values() if not sidecar.stale(now)]
        if registry.sidecars:
            at = min(heard) + STALE if heard else now + AGAIN
            self._timer = asyncio.get_running_loop().call_at(at, self._look)

    def _serving(self, id: str) -> bool:
        engine = self._dispatch.fleet.engines.get(id)
        return engine is not None and engine.health.up

    def _serving_of(self, model: str) -> list[str]:
        """The engines that are there to answer calls for a model, by id."""
        return [each.id for each in self._dispatch.fleet.answering(model) if each.health.up and not each.draining]

    def _in_flight(self, id: str) -> int:
        engine = self._dispatch.fleet.engines.get(id)
        return 0 if engine is None else engine.ledger.in_flight
