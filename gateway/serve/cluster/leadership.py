"""Leadership of one member: in each of its terms it has a hub for all machines' relays, grants within its lease, and
saves checkpoints in the store, with the last of which the next leader begins."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping

import msgspec

from gateway.core.checkpoint import CheckpointError
from gateway.core.cluster.election import TTL, Election
from gateway.decider.loading import Configuration
from gateway.decider.relays.hub import RelayHub
from gateway.frames.entrance import ClusterToken
from gateway.serve.assembly import Gateway
from gateway.serve.cluster.store import CheckpointStore, StoreError
from gateway.serve.hub_of import hub_of
from gateway.serve.saving import Saving, go_on_from
from gateway.shared.lines import say
from gateway.shared.tasks import telling

LOST = (
    "cluster: the store was emptied, and nobody else knows what providers have cost: their budgets of this day and "
    "month count as spent. To spend more, raise providers.*.budget"
)
AT_LEAST = 10.0  # seconds between two checkpoints of a quiet cluster: the store may have been emptied
NOBODY = 0  # stands among the relays that a hub waits for until the last checkpoint is there: no relay has this number


class Leadership(msgspec.Struct, eq=False):
    """`hub`: of the present term; None: another member leads, or nobody.

    `store` keeps checkpoints. `election` returns this member's part in the election. `expected` returns the process of
    each relay that lives when a term begins, by its number. `lives` says whether a relay's process is there. `deposed`
    receives the epoch of a member that leads in place of this one.
    """

    _gateway: Gateway
    _store: CheckpointStore
    _configuration: Configuration
    _token: ClusterToken
    election: Callable[[], Election]
    expected: Callable[[], Mapping[int, int]]
    lives: Callable[[int], bool]
    deposed: Callable[[int], None]
    hub: RelayHub | None = None
    _term: int = 0
    _before: int = 0  # epoch of the last leader but this member
    _led: int = 0  # last epoch whose money is all in this member's book
    _saving: Saving | None = None
    _loading: asyncio.Task[None] | None = None
    _closing: asyncio.Task[None] | None = None  # the hub of the term before

    def __post_init__(self) -> None:
        self._gateway.dispatch.set_lease(-math.inf)

    def start(self) -> None:
        """Save checkpoints from now on, while this member leads."""
        self._saving = Saving(self._take, self._changes, self._save)
        self._saving.start()

    def apply(self, configuration: Configuration) -> None:
        """Tell the relays of the gateway's policy."""
        self._configuration = configuration
        if self.hub is not None:
            named = configuration.policy.routing.cache_secret_file is not None
            secret = configuration.cache_secret if named else self._token.secret("cache salts")
            self.hub.apply(self._gateway.current.snapshot, (secret or "").encode())

    def follow(self, election: Election) -> None:
        """Begin or end a term, as the election has it."""
        if election.term != self._term:
            before = self._term or self._before
            old, self.hub, self._term = self.hub, None, election.term
            self._end_loading()
            if old is not None:
                self._closing = asyncio.get_running_loop().create_task(old.aclose())
                self._closing.add_done_callback(telling("the relays of a term that is over"))
            if self._term:
                self._begin(before)
        self._before = self._before if self._term else election.known

    def _begin(self, before: int) -> None:
        """Begin a term, which judges nothing before what the leader before has learned is there. `before`: epoch of the
        last leader that this member knew."""
        self.hub = hub_of(self._gateway, self._term, self.expected(), deposed=self.deposed, lives=self.lives)
        self.hub.start()
        self.apply(self._configuration)
        self._gateway.checkpoints.forget_money()
        self._loading = asyncio.get_running_loop().create_task(self._load(self.hub, before))
        self._loading.add_done_callback(telling("what the leader before has learned"))

    def set_lease(self, election: Election, now: float) -> None:
        """Grant until the end of the lease, once every relay has told what it holds."""
        if self.hub is not None and self.hub.complete:
            for name in list(election.awaited):
                election.synced(name)
        self._gateway.dispatch.set_lease(election.lease_until(now))

    async def resigned(self) -> None:
        """Wait until the calls of a term that is over wait for another leader."""
        if self._closing is not None:
            await asyncio.wait((self._closing,))

    def hand_over(self) -> None:
        """Grant nothing more: another process decides for what comes and waits."""
        self._gateway.dispatch.set_lease(-math.inf)
        self._end_loading()

    async def stop(self) -> None:
        """Save no more checkpoints."""
        self._end_loading()
        if self._saving is not None:
            await self._saving.aclose()
        if self._loading is not None:
            await asyncio.gather(self._loading, return_exceptions=True)
        await self._store.aclose()

    async def aclose(self) -> None:
        if self.hub is not None:
            await self.hub.aclose()

    # -- checkpoints --------------------------------------------------------------------------------------------

    def _end_loading(self) -> None:
        if self._loading is not None:
            self._loading.cancel()

    async def _load(self, hub: RelayHub, before: int) -> None:
        checkpoints = self._gateway.checkpoints
        try:
            state, passed = await self._store.load()
            money, lost = await self._store.load_money()
        except StoreError as error:
            say(f"cluster: what the leader before has learned is left out: the store does not answer: {error}")
        else:
            go_on_from(checkpoints, state, passed)
            if lost and before == self._led:  # a member that is there would tell of another's term since
                await asyncio.sleep(TTL)
                election = self.election()
                lost = bool(election.roster - election.members)
            try:
                if checkpoints.restore_money(money, lost=lost):
                    say(LOST)
                self._led = hub.epoch
            except CheckpointError as error:
                say(f"cluster: money that providers have cost cannot be read, so none is spent: {error}")
        hub.expect({})

    def _take(self) -> bytes:
        return self._gateway.checkpoints.take(() if self.hub is None else self.hub.ungranted)

    def _changes(self) -> int:
        """Number of changes, and of times that are to be saved anyway; 0 unless this member grants: another's last
        checkpoint is better until then."""
        if self.hub is None or not self.hub.complete or not self._grants:
            return 0
        return 1 + self.hub.changes + int(asyncio.get_running_loop().time() / AT_LEAST)

    @property
    def _grants(self) -> bool:
        return self.election().may_grant(asyncio.get_running_loop().time())

    async def _save(self, state: bytes) -> None:
        """Raises OSError. A leader whose lease has ended saves nothing: another may have led, and saved, meanwhile."""
        if self.hub is not None and self._grants:
            checkpoints = self._gateway.checkpoints
            try:
                kept = await self._store.save(state, self.hub.epoch, checkpoints.take_money())
            except StoreError as error:
                raise OSError(f"the store of the cluster: {error}") from error
            if kept:
                checkpoints.money_kept()
