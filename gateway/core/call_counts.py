"""Counts of ended calls, by what /metrics shows them by: one process's, or those of several added up.

Counting a call takes a dict look-up and a few integer additions (about 1 us). Labels come from the policy and the
fleet, never from a client: a model that nobody has is `other`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import UNSET

from gateway.core.histogram import Histogram
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record

RowKey = tuple[str, str, str, Outcome]  # route, class, model, outcome
INTEGERS = ("requests", "prompt", "completion", "cached", "attempts", "affinity", "shaped")
TIMES = ("queue", "ttft", "duration")


class CountRow:
    """Counts of one (route, class, model, outcome)."""

    __slots__ = (*INTEGERS, *TIMES)

    def __init__(self) -> None:
        self.requests = self.prompt = self.completion = self.cached = self.attempts = self.affinity = self.shaped = 0
        self.queue, self.ttft, self.duration = Histogram(), Histogram(), Histogram()


_Times = tuple[list[int], float]


class _State(msgspec.Struct, array_like=True):
    """All counts, as bytes have them."""

    rows: list[tuple[RowKey, list[int], list[_Times]]]
    waits: list[tuple[str, _Times, _Times]]
    tenants: list[tuple[str, Outcome, int, int]]
    prefills: list[tuple[str, str, int]] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_State).decode


class CallCounts:
    """`known` tells whether a model is there, for calls that no engine was given. `waits`: predicted waits of each
    class, and their errors; `tenants`: requests and tokens."""

    def __init__(self, known: Callable[[str], bool] = lambda _: True) -> None:
        self._known = known
        self.rows: dict[RowKey, CountRow] = {}
        self.waits: dict[str, tuple[Histogram, Histogram]] = {}
        self.prefills: dict[tuple[str, str], int] = {}  # by where the prompt was read, and why
        self.tenants: dict[tuple[str, Outcome], list[int]] = {}

    def observe(self, record: Record) -> None:
        """Count one ended call."""
        engine = record.engine
        model = record.model if engine or self._known(record.model) else "other"
        row = self.rows.get((record.route, record.class_name, model, record.outcome))
        if row is None:
            row = self.rows[record.route, record.class_name, model, record.outcome] = CountRow()
        row.requests += 1
        row.duration.observe(record.total)
        if engine:
            row.queue.observe(record.queue)
            if record.ttft and record.stream:  # a whole answer's first byte comes with its last
                row.ttft.observe(record.ttft)
            if record.settled:
                row.prompt += record.prompt_tokens
                row.completion += record.completion_tokens
                row.cached += record.cached_tokens
            row.affinity += record.affinity_tokens
            row.shaped += record.shaped_tokens
        if record.predicted_wait:
            self._waited(record)
        if record.attempts > 1:
            row.attempts += record.attempts - 1
        if record.prefill is not UNSET:
            note = record.prefill
            prefill = ("there" if note.is_there else "here", note.failure or note.reason)
            self.prefills[prefill] = self.prefills.get(prefill, 0) + 1
        tenant = self.tenants.get((record.tenant, record.outcome))
        if tenant is None:
            tenant = self.tenants[record.tenant, record.outcome] = [0, 0]
        tenant[0] += 1
        if engine:
            tenant[1] += record.prompt_tokens + record.completion_tokens

    def _waited(self, record: Record) -> None:
        """Count a predicted wait and its error."""
        waits = self.waits.get(record.class_name)
        if waits is None:
            waits = self.waits[record.class_name] = Histogram(), Histogram()
        waits[0].observe(record.predicted_wait)
        if record.engine:
            waits[1].observe(abs(record.queue - record.predicted_wait))

    @property
    def calls(self) -> int:
        """Calls that have ended."""
        return sum([row.requests for row in self.rows.values()])

    def outcomes(self) -> dict[str, int]:
        """Calls ended so far, by outcome."""
        totals: dict[str, int] = {}
        for (_, _, _, outcome), row in self.rows.items():
            totals[outcome.value] = totals.get(outcome.value, 0) + row.requests
        return totals

    def told(self) -> bytes:
        """All of it, for `add` in another process."""
        return _encode(
            _State(
                [
                    (key, [getattr(row, name) for name in INTEGERS], [_times(getattr(row, name)) for name in TIMES])
                    for key, row in self.rows.items()
                ],
                [(name, _times(wait), _times(error)) for name, (wait, error) in self.waits.items()],
                [(*key, counts[0], counts[1]) for key, counts in self.tenants.items()],
                [(*key, calls) for key, calls in self.prefills.items()],
            )
        )

    def add(self, told: bytes) -> None:
        """Add what another process has counted. Raises msgspec.MsgspecError, and then nothing was added."""
        state = _decode(told)
        for key, integers, times in state.rows:
            row = self.rows.setdefault(key, CountRow())
            for name, number in zip(INTEGERS, integers, strict=True):
                setattr(row, name, getattr(row, name) + number)
            for name, each in zip(TIMES, times, strict=True):
                getattr(row, name).add(*each)
        for name, wait, error in state.waits:
            waits = self.waits.setdefault(name, (Histogram(), Histogram()))
            waits[0].add(*wait)
            waits[1].add(*error)
        for place, reason, calls in state.prefills:
            self.prefills[place, reason] = self.prefills.get((place, reason), 0) + calls
        for tenant, outcome, requests, tokens in state.tenants:
            counts = self.tenants.setdefault((tenant, outcome), [0, 0])
            counts[0] += requests
            counts[1] += tokens


def _times(histogram: Histogram) -> _Times:
    return histogram.counts, histogram.sum
