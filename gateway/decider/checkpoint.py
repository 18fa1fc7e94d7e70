"""Checkpoints of one decider's soft state: gathered from its parts, and given back to those of the next.

What becomes of the bytes is for others to say: they go where a gateway's totals go, or into the store of a cluster.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import msgspec

from gateway.core.admission.limits import Charge
from gateway.core.checkpoint import (
    MOST_ENGINES,
    MOST_MODELS,
    MOST_PLACES,
    MOST_PREFIXES,
    MOST_VERDICTS,
    Checkpoint,
    CheckpointError,
    SavedEngine,
    decoded,
    encoded,
)
from gateway.core.engines.engine import Engine
from gateway.core.money.book import Spent
from gateway.decider.local import LocalDecider

HASHES = hash("which key Python's hashes have in this process")


class Checkpoints(msgspec.Struct, eq=False):
    """The soft state of a decider's parts."""

    _decider: LocalDecider
    _awaited: dict[str, SavedEngine] = {}  # engines that no sidecar has brought again yet
    _then: float = 0.0
    _same_hashes: bool = False
    _money: list[Spent] = []  # as it was taken last

    def take(self, waiting: Iterable[Charge] = ()) -> bytes:
        """The state of now. `waiting`: charges of calls that the next decider will judge and charge anew."""
        now, traffic = self._decider.clock(), self._decider.dispatch.traffic
        each = max(1, MOST_PLACES // max(1, sum(len(known.bookings) for known in traffic.values())))
        blocks = MOST_PREFIXES // max(1, len(self._decider.fleet.engines))
        return encoded(
            Checkpoint(
                HASHES,
                [engine.checkpoint(now, blocks) for engine in islice(self._decider.fleet, MOST_ENGINES)],
                self._decider.cost.checkpoint(),
                self._decider.limits.checkpoint(now, waiting),
                [known.checkpoint(model, now, each) for model, known in islice(traffic.items(), MOST_MODELS)],
                list(islice(self._decider.dispatch.routes.checkpoint(), MOST_VERDICTS)),
            )
        )

    def restore(self, data: bytes, passed: float) -> None:
        """Go on from a checkpoint that was taken `passed` seconds ago. Raises CheckpointError, and then nothing has
        changed."""
        checkpoint = decoded(data)
        then = self._then = self._decider.clock() - passed
        places = self._same_hashes = checkpoint.hashes == HASHES
        self._awaited = {saved.id: saved for saved in checkpoint.engines}
        for engine in self._decider.fleet:
            self.joined(engine)
        self._decider.cost.restore(checkpoint.costs)
        self._decider.limits.restore(checkpoint.limits, then, places=places)
        self._decider.dispatch.routes.restore(checkpoint.canaries)
        for saved in checkpoint.traffic:
            self._decider.dispatch.control.workload.open(saved.model, then)[1].restore(saved, then, places=places)

    # -- money of a cluster, which its store keeps for longer ------------------------------------------------------

    def forget_money(self) -> None:
        """Spend no money before what the leader before has spent is known."""
        self._decider.limits.money.forget()

    def take_money(self) -> bytes:
        """The money of now, and marks up to which it may be spent once it is kept; empty without providers, or before
        the money of the leader before is known."""
        money = self._decider.limits.money
        self._money = money.states(self._decider.clock()) if money and money.known else []
        return msgspec.msgpack.encode(self._money) if self._money else b""

    def money_kept(self) -> None:
        """Note that the store has what was taken last."""
        if self._money:
            self._decider.limits.money.keep(self._money)
            self._decider.dispatch.pump()

    def restore_money(self, data: bytes, *, lost: bool = False) -> bool:
        """Go on from the money that the leader before has kept; empty: there is none. `lost`: the store has lost money
        that was kept later. Return whether budgets count as spent for that. Raises CheckpointError, and then no money
        is spent."""
        try:
            states = msgspec.msgpack.decode(data, type=list[Spent]) if data else []
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"it is no money: {error}") from error
        self._decider.limits.money.restore(states, self._decider.clock(), kept=True)
        return lost and self._decider.limits.money.exhaust(self._decider.clock())

    def joined(self, engine: Engine) -> None:
        """An engine is there: it goes on with what was learned of it before."""
        saved = self._awaited.pop(engine.id, None)
        if saved is not None:
            engine.restore(saved, self._then, prefixes=self._same_hashes)
            self._decider.fleet.note_prefix(engine, tuple(reversed(engine.cache.blocks)))
