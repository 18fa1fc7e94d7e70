"""Registry of sidecars: the engines they add to the fleet, and the models they could have ready.

A report replaces the sidecar's earlier one. `take` returns the changes to the fleet, and its caller carries them out.
An engine leaves with the first report that no longer lists it.

A sidecar that has not reported for STALE seconds is stale. Its engines go on serving as long as their own health
checks pass. It is sent no requests, and its models that are not awake no longer count.

Of two sidecars that claim one engine, the first keeps it until it is stale. The same holds for two that claim one
name: a report with another key is refused, whatever its boot and sequence number.

Synchronous, no I/O; `now` is monotonic seconds.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Container, Mapping, Sequence

import msgspec

from gateway.core.engines.fleet import longest_of
from gateway.core.engines.origin import engine_id
from gateway.core.sidecars.addresses import Network, networks_of, refusal
from gateway.core.sidecars.copies import Copies
from gateway.core.sidecars.model_index import MOST_MODELS, ModelIndex
from gateway.core.sidecars.sidecar import STALE, Member, Outlook, Sidecar, cards_of, members_of
from gateway.shared.protocol import OFF, CapacityReport, Demand, ModelReport
from gateway.shared.vllm.answers import ModelCard

FORGOTTEN = 600.0  # seconds without a report after which a sidecar without serving engines is forgotten
MOST = 1000  # sidecars
UNIX = "unix://"
SAME = 0.5  # seconds: sidecars that are ready within this time of each other count as equal


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to the fleet by a report: engines that join, change, and leave.

    `log`: lines for the log. `expected`: the models that can be had have changed. `dropped`: the reason why the report
    was ignored, else empty.
    """

    join: tuple[Member, ...] = ()
    update: tuple[Member, ...] = ()
    leave: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    expected: bool = False
    dropped: str = ""


class UntrustedSidecar(Exception):
    """The sender of a report is not trusted. The message gives the reason."""


class NameConflict(Exception):
    """A report has the name of another sidecar that is not stale. The message names it."""


class RegistryFull(Exception):
    """Error for too many sidecars or models. The message says which."""


class Registry:
    """All sidecars by name.

    `models`: what they have. `waking`: by model, the sidecar and profile that are asked to make it ready.
    `socket_refusal`: returns the reason why a unix socket, named by its path, may not be used; empty: it may.
    """

    def __init__(self) -> None:
        self._since: float | None = None  # time since when the policy has sidecars
        self.socket_refusal: Callable[[str], str] = lambda _: ""
        self.sidecars: dict[str, Sidecar] = {}
        self.waking: dict[str, tuple[str, str]] = {}
        self.copies = Copies()
        self.models = ModelIndex()
        self.counts = {"taken": 0, "dropped": 0, "refused": 0, "address_refused": 0}
        self._networks: tuple[Network, ...] = ()
        self._secure = False
        self._taken: Container[str] = ()
        self._owners: dict[str, Sidecar] = {}  # by engine id

    # -- reports ------------------------------------------------------------------------------------------------

    def apply(
        self,
        allow: Sequence[str],
        taken: Container[str],
        now: float,
        copies: float | None = None,
        *,
        secure: bool = False,
    ) -> list[Changes]:
        """Set the allowed networks. `taken`: ids of engines that the policy itself names. `copies`: the margin of
        copies; None: they are never wanted. `secure`: other machines must have TLS."""
        self._networks, self._taken, self._secure = networks_of(allow), taken, secure
        self.copies.margin = copies
        self._since = now if self._since is None else self._since
        return [self._settle(sidecar, now) for sidecar in list(self.sidecars.values())]

    def take(self, report: CapacityReport, now: float, *, local: bool) -> Changes:
        """Take a report. `local`: it came from this machine. Raises RegistryFull and NameConflict."""
        sidecar = self.sidecars.get(report.sidecar)
        key = hashlib.sha256(report.key.encode()).digest()
        report = msgspec.structs.replace(report, key="")
        if sidecar is not None and not hmac.compare_digest(sidecar.key, key):
            if not sidecar.stale(now):
                self.counts["refused"] += 1
                raise NameConflict(f"another sidecar reports as {report.sidecar}: give each an `id` of its own")
            sidecar.key = key
            sidecar.boots.clear()
        elif sidecar is not None:
            late = sidecar.late(report)
            if late:
                self.counts["dropped"] += 1
                return Changes(dropped=late)
        self._bound(report)
        self.counts["taken"] += 1
        was_stale = sidecar is not None and sidecar.stale(now)
        if sidecar is None:
            sidecar = self.sidecars[report.sidecar] = Sidecar(report, key, now, local=local)
        elif report.boot != sidecar.report.boot:
            sidecar.boots.append(sidecar.report.boot)
            sidecar.failures = 0
        models = {model.profile: model for model in report.models}
        moved = _names(models) != _names(sidecar.models)
        sidecar.report, sidecar.reported_at, sidecar.local = report, now, local
        sidecar.models, sidecar.answers = models, {}
        sidecar.used = {profile: at for profile, at in sidecar.used.items() if profile in models}
        if moved:
            self.models.rebuild(self.sidecars.values())
        changes = self._settle(sidecar, now)
        return msgspec.structs.replace(changes, expected=True) if was_stale else changes

    def forget(self, now: float, serving: Callable[[str], bool]) -> Changes:
        """Remove sidecars without a report for FORGOTTEN seconds and without an engine that is `serving` (by id)."""
        leave: list[str] = []
        for name, sidecar in list(self.sidecars.items()):
            if now - sidecar.reported_at >= FORGOTTEN and not any(map(serving, sidecar.members)):
                leave += sidecar.members
                self._drop(name)
        return Changes(leave=tuple(leave), expected=True)

    def clear(self) -> Changes:
        """Remove all sidecars, for a policy without any."""
        self._since = None
        self.copies.forget()
        leave = tuple(self._owners)
        for name in list(self.sidecars):
            self._drop(name)
        self.models.forget_gone()
        return Changes(leave=leave, expected=True)

    def _drop(self, name: str) -> None:
        sidecar, names = self.sidecars.pop(name), self.models.names
        for id in sidecar.members:
            del self._owners[id]
        self.models.rebuild(self.sidecars.values())
        self.models.note_gone(names - self.models.names)

    def _bound(self, report: CapacityReport) -> None:
        known = self.sidecars.get(report.sidecar)
        if known is None and len(self.sidecars) >= MOST:
            raise RegistryFull(f"there are {MOST} sidecars already")
        more = len(report.models) - (0 if known is None else len(known.models))
        if more > 0 and self.models.profiles + more > MOST_MODELS:
            raise RegistryFull(f"with this one sidecars have more than {MOST_MODELS} models")

    def _settle(self, sidecar: Sidecar, now: float) -> Changes:
        """Apply a sidecar's last report: its engines join, change and leave."""
        refused: dict[str, str] = {}
        control = sidecar.report.control
        why = refusal(control, self._networks, local=sidecar.local, sockets=False, secure=self._secure)
        sidecar.control_allowed = not why
        if why:
            refused[control] = why
        join, update = [], []
        after: dict[str, Member] = {}
        for member in members_of(sidecar.report):
            why = self._refusal(member, sidecar, after, now)
            if why:
                refused[member.url] = why
                continue
            owner = self._owners.get(member.id)
            if owner is None and not member.open:
                continue  # it joins once it may get calls
            if owner is None:
                join.append(member)
            elif owner.members.get(member.id) != member:
                update.append(member)
            if owner not in (None, sidecar):
                del owner.members[member.id]  # the owner is stale, and loses its engine to this sidecar
            after[member.id] = member
        leave = [id for id in sidecar.members if id not in after]
        for id in leave:
            del self._owners[id]
        sidecar.members = after
        self._owners.update(dict.fromkeys(after, sidecar))
        log = [
            f"sidecar {sidecar.report.sidecar}: {url!r} is not used: {words}"
            for url, words in refused.items()
            if sidecar.refused.get(url) != words
        ]
        self.counts["address_refused"] += len(log)
        sidecar.refused = refused
        cards, sidecar.cards = sidecar.cards, cards_of(sidecar)
        return Changes(
            join=tuple(join),
            update=tuple(update),
            leave=tuple(leave),
            log=tuple(log),
            expected=cards != sidecar.cards,
        )

    def _refusal(self, member: Member, sidecar: Sidecar, before: Container[str], now: float) -> str:
        """The reason why an engine may not join the fleet; empty: it may."""
        why = refusal(member.url, self._networks, local=sidecar.local, secure=self._secure)
        if not why and member.url.startswith(UNIX):
            why = self.socket_refusal(member.url.removeprefix(UNIX))
        if why:
            return why
        if member.id in self._taken:
            return "the policy names this engine itself"
        if member.id in before:
            return "another profile of this sidecar has the same engine"
        owner = self._owners.get(member.id)
        if owner is not None and owner is not sidecar and not owner.stale(now):
            return f"it belongs to sidecar {owner.report.sidecar}"
        return ""

    # -- models that can be had ---------------------------------------------------------------------------------

    def awaited(self, now: float) -> bool:
        """Whether a running sidecar may not have reported yet, so that some models may still be unknown.

        After STALE seconds every running sidecar has reported: it pauses for less between its tries.
        """
        return self._since is not None and now - self._since < STALE

    def cards(self, now: float) -> dict[str, ModelCard]:
        """The models that some sidecar has or could have ready, each with its longest context."""
        heard = (sidecar for sidecar in self.sidecars.values() if not sidecar.stale(now))
        return longest_of(card for sidecar in heard for card in sidecar.cards.values())

    def outlook(self, model: str, now: float) -> Outlook | None:
        """The prediction of the sidecar that can have a model ready soonest; None: no sidecar can be asked for it.

        The sidecar that is being asked already is kept while it can have it ready. One that does not answer is the last
        resort. If none can, it is the one that may be asked again soonest, one where it is off last.
        """
        holders = self.models.holders(model)
        if not holders:
            return None
        current = self._current(model, now)
        if current is not None:
            return current
        best: tuple[tuple[bool, float, tuple[float, float], str, str], Outlook] | None = None
        cannot: Outlook | None = None
        for sidecar, profile in holders:
            outlook = sidecar.outlook(profile, now)
            if outlook is None:
                continue
            if outlook.ready_in is not None:
                key = (sidecar.failures > 0, outlook.ready_in // SAME, sidecar.load, outlook.sidecar, profile)
                if best is None or key < best[0]:
                    best = key, outlook
            elif cannot is None or _hope(outlook) < _hope(cannot):
                cannot = outlook
        return cannot if best is None else best[1]

    def _current(self, model: str, now: float) -> Outlook | None:
        """The prediction of the sidecar that is being asked; None: none is, or it should not be waited for."""
        name, profile = self.waking.get(model, ("", ""))
        sidecar = self.sidecars.get(name)
        report = None if sidecar is None else sidecar.models.get(profile)
        if sidecar is None or sidecar.failures or report is None or model not in report.served:
            return None
        outlook = sidecar.outlook(profile, now)
        return None if outlook is None or outlook.ready_in is None else outlook

    # -- demand, reported back to sidecars ----------------------------------------------------------------------

    def used(self, id: str, now: float) -> None:
        """Note that a call ended on this engine."""
        sidecar = self._owners.get(id)
        if sidecar is not None:
            sidecar.used[sidecar.members[id].profile] = now

    def wanted(self, outlook: Outlook, now: float) -> None:
        """Note that a call asked for a model that this profile can have ready."""
        self.sidecars[outlook.sidecar].used[outlook.profile] = now

    def demands(
        self,
        name: str,
        now: float,
        in_flight: Callable[[str], int],
        waiting: Callable[[str], int],
        serving: Callable[[str], Sequence[str]],
    ) -> tuple[Demand, ...]:
        """The demand for a sidecar's models: the answer to its report, in the order of its profiles.

        `in_flight`: calls on an engine, by id. `waiting`: calls that wait for a model. `serving`: ids of the engines
        that may be given calls for a model. Waiting calls count for the sidecar that is asked to have the model ready,
        else for each sidecar that has it awake. They count once a model, however many profiles serve it; and for the
        profile that is wanted as a copy, one at least.
        """
        sidecar = self.sidecars[name]
        engines = {member.profile: member for member in sidecar.members.values()}
        counted: set[str] = set()
        demands = []
        for profile, model in sidecar.models.items():
            member = engines.get(profile)
            is_open = member is not None and member.open
            queued = 0
            for served in model.served if model.answers else ():
                target = self.waking.get(served)
                if target == (name, profile) if target is not None else is_open and served not in counted:
                    counted.add(served)
                    queued += waiting(served)
            # One that drains may not be a member: calls of before a reload that did without it for a while run on it.
            running = in_flight(engine_id(model.url)) if model.url and model.url not in sidecar.refused else 0
            if running or queued:
                sidecar.used[profile] = now
            if self.copies.place(model.model) == (name, profile) and not is_open:
                queued = max(1, waiting(model.model))
            at = sidecar.used.get(profile)
            demands.append(
                Demand(
                    profile=profile,
                    in_flight=running,
                    waiting=queued,
                    idle=None if at is None else now - at,
                    withdrawn=not is_open,
                    copy=self._is_copy((name, profile), member, serving(model.model)),
                )
            )
        return tuple(demands)

    def _is_copy(self, place: tuple[str, str], member: Member | None, serving: Sequence[str]) -> bool:
        """Whether a profile's engine is, or would be, one beside another of its model. Of those that serve it one is
        not: an engine of the policy, else the first by sidecar and profile, which is the same at every gateway."""
        own = None if member is None else member.id
        if own not in serving:
            return bool(serving)
        return any(self._place(id) < place for id in serving if id != own)

    def _place(self, id: str) -> tuple[str, str]:
        """The sidecar and profile of an engine; empty names: the policy's own."""
        owner = self._owners.get(id)
        return ("", "") if owner is None else (owner.report.sidecar, owner.members[id].profile)


def _hope(outlook: Outlook) -> tuple[bool, float]:
    return outlook.why == OFF, math.inf if outlook.retry_in is None else outlook.retry_in


def _names(models: Mapping[str, ModelReport]) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """All names of the models of each profile."""
    return {profile: (model.served, model.aliases) for profile, model in models.items()}
