"""Takes sidecars' reports in: the fleet becomes what they say, calls that wait are told, sidecars hear of the demand.

What a report means is `core/sidecars.py`'s to say; engines join and leave through `Members`, which has everything that
belongs to one. One timer looks for sidecars that have fallen silent; nothing here is done for each call.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Callable, Collection, Container, Iterable
from typing import Protocol

from gateway.core.policy.policy import SidecarsPolicy
from gateway.core.sidecars.sidecar import STALE, Member
from gateway.core.sidecars.sidecars import Changes, UntrustedSidecar
from gateway.decider.dispatch import Dispatch
from gateway.decider.engine_sockets import socket_refusal
from gateway.shared.protocol import DemandReport, capacity_report

AGAIN = 60.0  # seconds between two looks at sidecars that are all silent


class Members(Protocol):
    """What makes an engine one of the fleet. `leave` may be told of an engine that calls still run on."""

    def join(self, member: Member) -> None: ...

    def update(self, member: Member) -> None: ...

    def leave(self, id: str) -> None: ...


class ReportIntake:
    """`say` takes lines for the operator. `heard` is told after each report, and when some sidecar has fallen silent:
    what was foretold may be otherwise. `socket_refusal`: see core.sidecars.Registry."""

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
        self._members = members
        self._heard = heard
        self._say = say
        self._name = f"gateway-{secrets.token_hex(8)}"
        self._policy: SidecarsPolicy | None = None
        self._token: bytes | None = None
        self._timer: asyncio.TimerHandle | None = None

    def apply(self, policy: SidecarsPolicy | None, token: str | None, taken: Container[str]) -> None:
        """Go by `policy` from now on; `taken` are the ids of engines that it names itself. Without one no sidecar is
        heard, and what they have brought leaves."""
        self._policy = policy
        self._token = None if token is None else hashlib.sha256(token.encode()).digest()
        if policy is None:
            self._carry_out(self._registry.clear())
        else:
            for changes in self._registry.apply(policy.allow, taken, self._dispatch.clock()):
                self._carry_out(changes)

    @property
    def hosts(self) -> Collection[str]:
        """Names of this gateway, beside its addresses, by which sidecars may call it."""
        return () if self._policy is None else self._policy.hosts

    def admit(self, token: bytes | None) -> None:
        """Whether reports are taken from who shows `token`. Raises Untrusted. Digests are compared, so that time tells
        neither content nor length."""
        if self._policy is None:
            raise UntrustedSidecar("This gateway's policy has no fleet.sidecars: no sidecar is heard.")
        if self._token is None:
            raise UntrustedSidecar("This gateway's policy has no fleet.sidecars.token_file: no sidecar is heard.")
        if token is None or not hmac.compare_digest(hashlib.sha256(token).digest(), self._token):
            raise UntrustedSidecar(
                "A sidecar shows the token of fleet.sidecars.token_file: Authorization: Bearer TOKEN."
            )

    def report(self, body: bytes, *, local: bool) -> DemandReport:
        """Take a report in; `local`: it came from this machine. Raises WireError, RegistryFull, NameConflict."""
        report = capacity_report(body)
        registry, now = self._registry, self._dispatch.clock()
        before = registry.sidecars.get(report.sidecar)
        models = set() if before is None else {model.model for model in before.models.values()}
        changes = registry.take(report, now, local=local)
        if changes.dropped:
            if not changes.dropped.startswith("report "):  # it is another's, or its network is very slow
                self._say(f"sidecar {report.sidecar}: {changes.dropped} is not taken")
        else:
            self._carry_out(changes)
            self._news(models.union(model.model for model in report.models))
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(STALE, self._look)
        return DemandReport(
            gateway=self._name,
            boot=report.boot,
            sequence=report.sequence,
            demands=registry.demands(report.sidecar, now, self._in_flight, self._dispatch.waiting),
        )

    def close(self) -> None:
        """No more timers."""
        if self._timer is not None:
            self._timer.cancel()

    def _carry_out(self, changes: Changes) -> None:
        for id in changes.leave:
            self._members.leave(id)
        for member in changes.join:
            self._members.join(member)
        for member in changes.update:
            self._members.update(member)
        for line in changes.log:
            self._say(line)
        if changes.expected:
            self._dispatch.fleet.expect(self._registry.cards(self._dispatch.clock()))

    def _news(self, models: Iterable[str]) -> None:
        """Calls that wait for one of these models look again."""
        for model in models:
            self._dispatch.reconsider(model)
        self._heard()

    def _look(self) -> None:
        """Sidecars that have fallen silent have nothing to offer any more, and one day are forgotten."""
        now, registry = self._dispatch.clock(), self._registry
        silent = [sidecar for sidecar in registry.sidecars.values() if sidecar.stale(now)]
        self._carry_out(registry.forget(now, self._serving))
        self._news({model.model for sidecar in silent for model in sidecar.models.values()})
        self._timer = None
        heard = [sidecar.reported_at for sidecar in registry.sidecars.values() if not sidecar.stale(now)]
        if registry.sidecars:
            at = min(heard) + STALE if heard else now + AGAIN
            self._timer = asyncio.get_running_loop().call_at(at, self._look)

    def _serving(self, id: str) -> bool:
        engine = self._dispatch.fleet.engines.get(id)
        return engine is not None and engine.up

    def _in_flight(self, id: str) -> int:
        engine = self._dispatch.fleet.engines.get(id)
        return 0 if engine is None else engine.in_flight
