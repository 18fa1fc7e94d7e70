"""Data port of a gateway in a cluster: it decides for all machines, or passes its relays on to the leader."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import ssl
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gateway.control.calls import CallView
from gateway.control.cluster import ClusterView
from gateway.control.processes import ProcessView
from gateway.decider.loading import ClusterFiles, Configuration
from gateway.decider.metrics.families import cluster_families
from gateway.decider.relays.elsewhere import channel_from
from gateway.decider.relays.hub import ELSEWHERE
from gateway.decider.relays.totals import lives
from gateway.frames.channel import Channel
from gateway.frames.entrance import WITHIN, ClusterToken, Entrance, Proof, Unwanted
from gateway.frames.messages import VERSION, RelayCounts
from gateway.frames.visitors import Visitors
from gateway.relay.wire.server import address_of
from gateway.serve.assembly import Gateway
from gateway.serve.cluster.leadership import NOBODY, Leadership
from gateway.serve.cluster.membership import Membership, begun
from gateway.serve.cluster.relay_proxies import RelayProxies, RelayProxy
from gateway.serve.cluster.store import CheckpointStore, Machines, MemberRecord, Store, control_url, members_of, opened
from gateway.serve.hub_of import calls_of, processes_of
from gateway.serve.processes.deciding import DeciderProcess
from gateway.serve.processes.place import CLOSING, HANDED, OFFERED, READY, TAKE
from gateway.serve.starting import OTHER_CLUSTER, ApplyError, Options, StartError
from gateway.serve.upgrade.receiver import Predecessor, receive_payload, same_member
from gateway.serve.upgrade.rendezvous import HandOffPayload, Offer
from gateway.shared.addresses import split_address
from gateway.shared.lines import say
from gateway.shared.tasks import cancel, lasting

TICK = 0.05  # seconds between two looks at whether every relay has told what it holds
JOINED_WITHIN = 5.0  # seconds, at the first start, for somebody to lead and to take the relays
RELEASED_WITHIN = 2.0  # seconds for a gateway that was taken over to close its members' port
IN_THE_CLEAR = (
    "cluster: members of %s talk in the clear: what calls ask for, and engines' keys, can be read on the network "
    "between them; cluster.tls hides them"
)
PROBES = 3  # seconds after the start: whether this member can be reached


class ClusterPort:
    """Port with the methods of MachinePort, in gateway/serve/data_port.py. Raises StartError."""

    def __init__(
        self, gateway: Gateway, options: Options, configuration: Configuration, process: DeciderProcess
    ) -> None:
        policy, files = configuration.policy.cluster, configuration.cluster
        if policy is None or files is None:
            raise StartError("cluster: the policy has none")
        me, place = options.advertise or policy.advertise, process.place
        if me is None:
            raise StartError(
                "cluster: which address do other members reach this one at? Give cluster.advertise, or --advertise"
            )
        self._gateway = gateway
        gateway.relays = self.totals
        self._place = place
        self._policy = policy
        self._beats = process.beats
        self._clock = gateway.clock
        self._token = ClusterToken(policy.name, files.tokens)
        self._certificate, self._contents = files.certificate, files.contents
        self._secure: ssl.SSLContext | None = None
        self._visitors = Visitors(say)
        self._listen = policy.listen or me
        self._machines = Machines(lambda: self.membership.records)
        self._server: asyncio.Server | None = None
        self._entrance: asyncio.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._said = ""
        self._handed = self._draining = False  # to another gateway; relays that end are not replaced
        self.addresses = [address_of(each, options.certificate is not None) for each in place.data]
        self._member = f"{policy.name} {me}"
        secure = options.control_certificate is not None
        self.membership = self._join(me, files, configuration, secure=secure)
        taken = place.inherited.taken
        self._relays = RelayProxies(self._clock, self._arrived, self.membership.reached, self._unreached)
        if taken is not None:
            self._relays.pids.update(taken.relays)
        self._tell_numbers()
        gateway.families.append(self._families)
        gateway.sidecars.cluster = (me, lambda: members_of(self.membership.records))
        if policy.tls is None and place.first:
            say(IN_THE_CLEAR % policy.name)

    def _join(self, me: str, files: ClusterFiles, configuration: Configuration, *, secure: bool) -> Membership:
        """Open the store, and become the member `me`. Raises StartError."""
        place, name, taken = self._place, self._policy.name, self._place.inherited.taken
        life = (taken.offer.life if taken is not None else "") or f"{place.parent_started:.6f}-{place.secret[:16]}"
        try:
            clients = [opened(self._policy.url, files.password) for _ in range(2)]
            record = MemberRecord(life, place.relays, control_url(place.control, me, secure=secure))
            self._store = Store(clients[0], name, me, record, self._token.fingerprints)
        except ValueError as error:
            raise StartError(str(error)) from error
        self._leadership = Leadership(
            self._gateway,
            CheckpointStore(clients[1], name, me),
            configuration,
            self._token,
            election=lambda: self.membership.election,
            expected=self._expected,
            lives=self._lives,
            deposed=self._deposed,
        )
        left = Path(place.path).with_name("cluster.json")
        return Membership(
            me,
            life,
            self._store,
            self._token,
            left,
            self._clock,
            begun(me, left, self._clock()),
            trust=None if files.trust is None else files.trust.context(),
            name=None if files.trust is None else files.trust.name,
            changed=self._changed,
            say=say,
        )

    # -- as MachinePort -----------------------------------------------------------------------------------------

    async def listen(self, context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        host, port = split_address(self._listen)
        self._secure = secure = self._context()
        shaken = None if secure is None else WITHIN
        until = self._clock() + (RELEASED_WITHIN if self._place.inherited.taken is not None else 0.0)
        while self._entrance is None:
            try:
                self._entrance = await loop.create_server(
                    self._visitor, host, port, ssl=secure, ssl_handshake_timeout=shaken, reuse_address=True
                )
            except OSError as error:
                if self._clock() >= until:
                    raise StartError(f"cluster.listen {self._listen}: {error.strerror or error}") from error
                await asyncio.sleep(TICK)
        self._server = await loop.create_unix_server(self._relays.channel, sock=self._place.inner)
        self.membership.start()
        self._leadership.start()
        self._task = lasting("the watch over the cluster", self._watch)
        if self._place.first:
            until = self._clock() + JOINED_WITHIN
            while sum(proxy.welcome for proxy in self._relays.all) < self._place.relays and self._clock() < until:  # noqa: ASYNC110 # once, at the start
                await asyncio.sleep(TICK / 2)
        self._beats.tell(READY)

    def _context(self) -> ssl.SSLContext | None:
        """For visitors: of the certificate's files or, where these are faulty by now, of what they held before."""
        if self._certificate is None:
            return None
        try:
            return self._certificate.context(Path.read_bytes)
        except (OSError, ValueError):  # the reload of the policy tells
            return self._certificate.context_of(self._contents)

    def apply(self, configuration: Configuration) -> None:
        """As MachinePort's. The store's password counts at the next start. Raises OSError too."""
        if configuration.policy.cluster != self._policy:
            raise ApplyError(OTHER_CLUSTER)
        files = configuration.cluster
        assert files is not None  # noqa: S101 # the policy has a cluster
        trust = None if files.trust is None else files.trust.context()
        if self._certificate is not None and self._secure is not None:
            self._certificate.renew(self._secure)  # before all else, as it may fail
        self._gateway.apply(configuration)
        self._token.renew(files.tokens)
        self._store.fingerprints = self._token.fingerprints
        self.membership.trust = trust
        self._leadership.apply(configuration)

    async def take_over(self, taken: Predecessor) -> None:
        same_member(taken, self._member)
        await _try_listen(self._listen)
        given = await receive_payload(taken, partial(self._beats.tell, TAKE))
        self._relays.take(given)
        self._tell_numbers()
        if given.promised:
            self.membership.restore(given.promised)

    def offer(self) -> tuple[Offer, list[int]]:
        place, pids = self._place, self._relay_pids()
        relays, owner = place.inherited.relays + place.relays, place.inherited.owner
        life = self.membership.life
        offer = Offer(VERSION, place.epoch, relays, len(place.data), owner, pids=pids, member=self._member, life=life)
        self._beats.tell(OFFERED)
        return offer, [each.fileno() for each in place.data]

    def hand_over(self, within: float, decider: str) -> HandOffPayload:
        self._beats.tell(HANDED)
        self._handed = True
        if self._entrance is not None:
            self._entrance.close()
        self._leadership.hand_over()
        left = self._relays.totals.given(self._relays.pids)
        given = HandOffPayload(self._relay_pids(), left, promised=self.membership.hand_over())
        self._relays.hand_over(within, decider)
        return given

    async def resign(self) -> None:
        """Have another member decide for what waits, if there is one."""
        await self.membership.resign()
        await self._leadership.resigned()

    async def drain(self, within: float, *, gently: bool = False) -> None:
        if self._handed:  # its relays are another's
            while gently and self._relays.all:  # noqa: ASYNC110 # once, at the end
                await asyncio.sleep(TICK)
            return
        self._beats.tell(CLOSING)
        self._place.stop_listening()
        self._draining = True
        self._relays.drain(within)
        while self._relays.all or self._relays.living():  # noqa: ASYNC110 # once, at the end
            await asyncio.sleep(TICK)
        await self.membership.leave()

    def totals(self) -> Sequence[RelayCounts]:
        return self._relays.totals.all()

    async def count(self) -> None:
        await self._relays.count()

    def calls(self) -> Iterable[CallView]:
        hub = self._leadership.hub
        return () if hub is None else calls_of(hub)

    def processes(self) -> list[ProcessView]:
        return processes_of(self._place, self._relays.totals.ended, self._relays.all)

    async def aclose(self) -> None:
        for server in (self._server, self._entrance):
            if server is not None:
                server.close()
        await cancel(self._task)
        await self._leadership.stop()
        await self.membership.aclose()
        self._relays.reconnect()
        await self._leadership.aclose()

    # -- the leader ----------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """The leader may have changed, or until when."""
        election = self.membership.election
        self._leadership.follow(election)
        line = repr(election.leader)
        if line != self._said:
            self._said = line
            self._relays.reconnect()
        self._leadership.set_lease(election, self._clock())

    def _expected(self) -> dict[int, int]:
        """Processes of the relays that live, here and at members whose word is awaited, by number."""
        expected = {NOBODY: os.getpid()} | self._place.living | self._relays.pids
        return expected | self._machines.relays_of(self.membership.election.awaited - {self.membership.me})

    def _deposed(self, epoch: int) -> None:
        self.membership.election.observe(epoch, self._clock())
        asyncio.get_running_loop().call_soon(self.membership.news)

    async def _watch(self) -> None:
        probed = self._clock() + PROBES
        while True:
            await asyncio.sleep(TICK)
            self._leadership.set_lease(self.membership.election, self._clock())
            self._tell_numbers()
            if self._clock() > probed:
                probed = math.inf
                await self.membership.probe()

    # -- relays -------------------------------------------------------------------------------------------------

    def _arrived(self, proxy: RelayProxy) -> None:
        """Pass a relay on to the leader. Without a leader it waits for one."""
        leader, hub = self.membership.election.leader, self._leadership.hub
        if hub is not None:
            proxy.serve(hub)
        elif leader is not None:
            proxy.lead(self._lead)

    async def _lead(self, made: Callable[[], Channel]) -> None:
        leader = self.membership.election.leader
        if leader is None:
            raise Unwanted("nobody leads")
        await self.membership.visit(leader.name, None, made)

    def _unreached(self, why: str) -> None:
        leader = self.membership.election.leader
        if leader is not None:
            self.membership.unreached(f"cluster: {leader.name} leads, and cannot be reached from here: {why}")

    def _visitor(self) -> Entrance:
        return Entrance(self._token, self._enter, self._visitors)

    def _enter(self, proof: Proof) -> tuple[Channel | None, bool]:
        """Let another member's relay in, or give a vote. Raises Unwanted."""
        if proof.vote is not None:
            return None, proof.vote.leader == proof.member and self.membership.vote(proof.vote)
        hub = self._leadership.hub
        if hub is None:
            raise Unwanted("it does not lead")
        return channel_from(hub, self._machines.place(proof.member, proof.life)), False

    def _lives(self, pid: int) -> bool:
        """Whether a process of this machine, or another's relay, is there."""
        if pid < ELSEWHERE:
            return lives(pid)
        return self._machines.has(pid) or self.membership.election.blind(self._clock())

    def _relay_pids(self) -> dict[int, int]:
        """Processes of this machine's relays, by number."""
        return self._relays.living(self._place.living)

    def _tell_numbers(self) -> None:
        """Record the numbers of this machine's relays for other members. Relays of an earlier gateway count until they
        end."""
        first, place = self._place.inherited.relays + 1, self._place
        own = () if self._draining else range(first, first + place.relays)
        if first > 1 or self._draining:
            numbers = tuple(sorted({*own, *self._relay_pids()}))
            self._store.record = msgspec.structs.replace(self._store.record, numbers=numbers)

    def _families(self) -> Iterable[Any]:
        view = self.cluster()
        return cluster_families(granting=view.granting, store_up=view.store_error is None)

    def cluster(self) -> ClusterView:
        """For the control port."""
        return self.membership.view(self._policy.name)


async def _try_listen(listen: str) -> None:
    """Find an address at which nobody can listen, before another gateway stops for this one; one in use may be that
    gateway's. Raises StartError."""
    host, number = split_address(listen)
    try:
        server = await asyncio.get_running_loop().create_server(
            asyncio.Protocol, host, number, reuse_address=True, start_serving=False
        )
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise StartError(f"cluster.listen {listen}: {error.strerror or error}") from error
    else:
        server.close()
