"""Checkpoints of a cluster's decider: the leader saves them in the store, and the next leader begins with the last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.core.checkpoint import CheckpointError
from gateway.core.cluster.election import TTL, Election
from gateway.decider.checkpoint import Checkpoints
from gateway.decider.relays.hub import RelayHub
from gateway.serve.cluster.store import CheckpointStore, StoreError
from gateway.serve.saving import Saving, go_on_from
from gateway.shared.lines import say
from gateway.shared.tasks import telling

LOST = (
    "cluster: the store was emptied, and nobody else knows what providers have cost: their budgets of this day and "
    "month count as spent. To spend more, raise providers.*.budget"
)
AT_LEAST = 10.0  # seconds between two checkpoints of a quiet cluster: the store may have been emptied
NOBODY = 0  # stands among the relays that a hub waits for until `begins` is done: no relay has this number


class TermCheckpoints:
    """The checkpoints of one member's terms. `checkpoints` makes and takes them. `election` returns this member's
    part in the election."""

    def __init__(self, checkpoints: Checkpoints, store: CheckpointStore, election: Callable[[], Election]) -> None:
        self._checkpoints = checkpoints
        self._store = store
        self._election = election
        self._hub: RelayHub | None = None
        self._led = 0  # last epoch whose money is all in this member's book
        self._saving = Saving(self._take, self._changes, self._save)
        self._loading: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Save from now on, while this member leads."""
        self._saving.start()

    def begins(self, hub: RelayHub, before: int) -> None:
        """Begin a term, whose relays `hub` has. It judges nothing before what the leader before has learned is there.
        `before`: epoch of the last leader that this member knew."""
        self.ends()
        self._hub = hub
        self._checkpoints.forget_money()
        self._loading = asyncio.get_running_loop().create_task(self._load(hub, before))
        self._loading.add_done_callback(telling("what the leader before has learned"))

    def ends(self) -> None:
        """Save no more: this member's term is over."""
        self._hub = None
        if self._loading is not None:
            self._loading.cancel()

    async def aclose(self) -> None:
        self.ends()
        await self._saving.aclose()
        if self._loading is not None:
            await asyncio.gather(self._loading, return_exceptions=True)
        await self._store.aclose()

    async def _load(self, hub: RelayHub, before: int) -> None:
        try:
            state, passed = await self._store.load()
            money, lost = await self._store.load_money()
        except StoreError as error:
            say(f"cluster: what the leader before has learned is left out: the store does not answer: {error}")
        else:
            go_on_from(self._checkpoints, state, passed)
            if lost and before == self._led:  # a member that is there would tell of another's term since
                await asyncio.sleep(TTL)
                election = self._election()
                lost = bool(election.roster - election.members)
            try:
                if self._checkpoints.restore_money(money, lost=lost):
                    say(LOST)
                self._led = hub.epoch
            except CheckpointError as error:
                say(f"cluster: money that providers have cost cannot be read, so none is spent: {error}")
        hub.expect({})

    def _take(self) -> bytes:
        return self._checkpoints.take(() if self._hub is None else self._hub.ungranted)

    def _changes(self) -> int:
        """Number of changes, and of times that are to be saved anyway; 0 unless this member grants: another's last
        checkpoint is better until then."""
        if self._hub is None or not self._hub.complete or not self._grants:
            return 0
        return 1 + self._hub.changes + int(asyncio.get_running_loop().time() / AT_LEAST)

    @property
    def _grants(self) -> bool:
        return self._election().may_grant(asyncio.get_running_loop().time())

    async def _save(self, state: bytes) -> None:
        """Raises OSError. A leader whose lease has ended saves nothing: another may have led, and saved, meanwhile."""
        if self._hub is not None and self._grants:
            try:
                kept = await self._store.save(state, self._hub.epoch, self._checkpoints.take_money())
            except StoreError as error:
                raise OSError(f"the store of the cluster: {error}") from error
            if kept:
                self._checkpoints.money_kept()
