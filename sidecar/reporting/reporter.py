"""Reporter to every gateway: a report each second and at every change; its answers go to the manager.

A gateway of this machine is told the engines' own addresses, one of another machine their addresses at the relay. Each
gateway has a task of its own (gateway_link.py), so one that is slow or gone delays no other. Members of a cluster that
a gateway tells of are reported to as well: whichever of them leads next knows the models then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from gateway.shared.protocol import ENGINES_PATH, MAX_MEMBERS, CapacityReport, ClusterMember, DemandReport, ModelReport
from gateway.shared.tasks import lasting
from sidecar.core.config import is_local
from sidecar.core.status import GatewayStatus
from sidecar.reporting.gateway_link import GatewayLink, Reporting
from sidecar.residency.manager import Manager

LOOK_EVERY = 0.02  # seconds between two looks whether gateways still use engines that are about to end
ENDING = "the sidecar of its machine is ending"


def following(known: Sequence[GatewayLink], *, relay: bool) -> tuple[list[ClusterMember], list[str]]:
    """Members to report to from now on, and URLs of those to leave. A member that no gateway names, and that takes no
    reports, is left, once some gateway has told of others; so is one that the file names by another address. `relay`:
    gateways on other machines can reach this one."""
    named = {
        member.name: member
        for gateway in known
        for member in gateway.members
        if _acceptable(member.control, gateway.url, relay=relay)
    }
    own = {gateway.member for gateway in known if gateway.configured} - {""}
    urls = {member.control for member in named.values()}
    leave = [
        gateway.url
        for gateway in known
        if not gateway.configured
        and (gateway.member in own or (urls and not gateway.taken and gateway.url not in urls))
    ]
    stay = [gateway for gateway in known if gateway.url not in leave]
    names, reached = {gateway.member for gateway in stay}, {gateway.url for gateway in stay}
    join = [each for name, each in sorted(named.items()) if name not in names and each.control not in reached]
    room = MAX_MEMBERS - sum(not gateway.configured for gateway in stay)
    return join[:room], leave


def _acceptable(url: str, teller: str, *, relay: bool) -> bool:
    """Whether the report token may go there at a gateway's word: nowhere in the clear if that gateway is asked over
    TLS, to no port of this machine if it is on another, and to other machines only if they can reach this one."""
    if teller.startswith("https:") and not url.startswith("https:"):
        return False
    return is_local(teller) if is_local(url) else relay


class Reporter:
    """Reports to `gateways` (URLs of control ports) until `aclose`."""

    def __init__(self, manager: Manager, gateways: Iterable[str], settings: Reporting) -> None:
        self._manager, self._settings = manager, settings
        self._withdrawn: int | None = None  # the last report before all engines were withdrawn, if they are
        self._links = [self._link(url) for url in gateways]
        self._tasks: dict[GatewayLink | None, asyncio.Task[None]] = {}  # None: that of changes
        self._leaving: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin; the first report goes at once."""
        self._tasks[None] = lasting("the watch over what has changed", self._pass_on)
        for link in self._links:
            self._begin(link)

    def go_by(self, token: str | None, ca: str | None) -> None:
        """Show gateways this token, and trust these authorities of their certificates, from now on."""
        self._settings = msgspec.structs.replace(self._settings, token=token, ca=ca)
        for link in self._links:
            link.go_by(token, ca)

    def _link(self, url: str, member: str = "") -> GatewayLink:
        return GatewayLink(url, self._settings, self._report, self._heard, member)

    def _begin(self, link: GatewayLink) -> None:
        self._tasks[link] = lasting(f"reports to {link.url}", link.run)

    async def aclose(self) -> None:
        """A last report to those that took the one before, then no more."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), *self._leaving, return_exceptions=True)
        await asyncio.gather(*(link.last() for link in self._links))

    async def withdraw(self, within: float) -> None:
        """All engines are about to end: have the gateways send them nothing more, and wait until what runs has ended,
        but `within` seconds at most."""
        self._withdrawn = self._manager.machine.demand.reports
        self._manager.changed.set()
        end = _now() + within
        while _now() < end and self._in_use():  # noqa: ASYNC110 # engines tell no event
            await asyncio.sleep(LOOK_EVERY)

    def _in_use(self) -> bool:
        """Whether a gateway has calls at an engine, or may have as it has not answered since."""
        unheard = any(link.taken and link.answered <= (self._withdrawn or 0) for link in self._links)
        return unheard or any(map(self._manager.requests_active, self._manager.entries))

    def gateways(self) -> tuple[GatewayStatus, ...]:
        """The state of each link."""
        return tuple(link.status() for link in self._links)

    async def _pass_on(self) -> None:
        changed = self._manager.changed
        while True:
            await changed.wait()
            changed.clear()
            for link in self._links:
                link.changed.set()

    def _report(self, relayed: bool, control: str) -> CapacityReport:
        """The next report, for a gateway that reaches us at `control`, which is the relay if `relayed`."""
        report = self._manager.report(self._settings.sidecar, self._settings.boot, control)
        models = report.models
        if relayed:
            models = tuple(_at_relay(model, control) for model in models)
        if self._withdrawn is not None:
            models = tuple(map(_ending, models))
        return msgspec.structs.replace(report, models=models)

    def _heard(self, answer: DemandReport) -> None:
        """Take a gateway's answer to a report. One to an earlier start of this sidecar says nothing of this one."""
        if answer.boot == self._settings.boot:
            self._manager.heard(answer)
        self._follow()

    def _follow(self) -> None:
        """Report to the members of clusters that gateways tell of, and to those that have left no longer."""
        join, leave = following(self._links, relay=self._settings.relay is not None)
        for link in [link for link in self._links if link.url in leave and not link.configured]:
            self._links.remove(link)
            why = "it is no member of its cluster, or known already"
            self._settings.say(f"gateway {link.url} is reported to no longer: {why}")
            leaving = asyncio.get_running_loop().create_task(_left(link, self._tasks.pop(link)))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        for member in join:
            if member.control.startswith("http:") and not is_local(member.control):
                self._settings.say(
                    f"the report token crosses the network to {member.control}, a member of a cluster, in the clear: "
                    "--control-tls-cert of that gateway hides it"
                )
            link = self._link(member.control, member.name)
            self._links.append(link)
            self._begin(link)


async def _left(link: GatewayLink, task: asyncio.Task[None]) -> None:
    """End the reports to a gateway."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await link.aclose()


def _at_relay(model: ModelReport, relay: str) -> ModelReport:
    """The report of a model whose engine is reached by the relay at the URL `relay`."""
    return msgspec.structs.replace(model, url=f"{relay}{ENGINES_PATH}{model.profile}") if model.url else model


def _ending(model: ModelReport) -> ModelReport:
    """The report of a model whose engine is about to end, or has ended."""
    if model.url:
        return msgspec.structs.replace(model, pending="stop", ready_in=None, why="draining", message=ENDING)
    return msgspec.structs.replace(
        model, state="stopped", pending=None, ready_in=None, why="draining", message=ENDING, sleep_level=0
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
