"""Record of every ended call: counted in the metrics, written to the call log by the policy's share."""

from __future__ import annotations

import random
from collections.abc import Callable

from msgspec import UNSET

from gateway.core.call_counts import CallCounts
from gateway.core.policy.snapshot import Current
from gateway.core.request.record import COPY, Record
from gateway.decider.call_log import CallLog
from gateway.decider.ended_calls import EndedCalls
from gateway.decider.metrics.collector import Metrics


class Recorder:
    """Recorder of ended calls. While `watched`, it reports each end to `ended`, for tasks that look after engines.
    `kept` holds the last records for the console."""

    def __init__(
        self,
        current: Current,
        counts: Metrics | CallCounts,
        log: CallLog | None,
        ended: Callable[[Record], None],
        clock: Callable[[], float],
        rng: random.Random,
        kept: EndedCalls | None = None,
    ) -> None:
        self._current = current
        self._count = counts.observe
        self.log = log
        self.watched = False
        self.labels: dict[str, str] = {}  # of engines whose name for operators is not their id
        self._ended = ended
        self._clock = clock
        self._rng = rng
        self._kept = kept

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
