"""Record of every ended call: counted in the metrics, written to the call log by the policy's share."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
from msgspec import UNSET

from gateway.core.policy.snapshot import Current
from gateway.core.request.record import COPY, Record
from gateway.decider.call_log import CallLog
from gateway.decider.ended_calls import EndedCalls


class Recorder(msgspec.Struct, eq=False):
    """Recorder of ended calls. While `watched`, it reports each end to `ended`, for tasks that look after engines.
    `kept` holds the last records for the console."""

    _current: Current
    _count: Callable[[Record], None]
    log: CallLog | None
    _ended: Callable[[Record], None]
    _clock: Callable[[], float]
    _rng: random.Random
    _kept: EndedCalls | None = None
    watched: bool = False
    labels: dict[str, str] = {}  # of engines whose name for operators is not their id

    def name(self, id: str, label: str) -> None:
        """Write `label` for the engine `id` from now on."""
        if label == id:
            self.labels.pop(id, None)
        else:
            self.labels[id] = label

    def observe(self, record: Record) -> None:
        """Take the record of a call that has just ended."""
        if record.mirrored != COPY:
            self._count(record)
        label = self.labels.get(record.engine) if self.labels else None
        if record.prefill is not UNSET:
            record.prefill.engine = self.labels.get(record.prefill.engine, record.prefill.engine)
        if self.watched:
            self._ended(record)  # it may forget the engines
        if label is not None:
            record.engine = label
        share = self._current.policy.logging.calls
        now = self._clock()
        if self.log is not None and (share >= 1 or self._rng.random() < share):
            self.log.write(record, now)
        if self._kept is not None:
            self._kept.add(record, now)

    async def aclose(self) -> None:
        """Write what is left of the log."""
        if self.log is not None:
            await self.log.aclose()
