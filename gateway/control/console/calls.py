"""Ended calls for the console: as rows of its list, and each as its life."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import UNSET

from gateway.control.console.life import Beside, Step, beside_of, life
from gateway.control.console.reading import ConsoleReading
from gateway.core.request.outcome import got, kind_of
from gateway.decider.dispatch import Dispatch
from gateway.decider.ended_calls import EndedCalls
from gateway.shared.fields import made_of


class EndedCall(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Ended call, as a row. `ended`: Unix seconds. Other times are seconds from the first byte of its request."""

    serial: int
    ended: float
    request_id: str
    tenant: str
    class_name: str
    model: str
    engine: str
    outcome: str
    status: int
    reason: str
    queue: float
    ttft: float
    total: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    held_tokens: int
    predicted_wait: float
    affinity_tokens: int
    shaped_tokens: int
    attempts: int
    stream: bool
    settled: bool
    route: str
    trace_id: str
    kind: str  # answered, refused, failed, caller
    got: str  # what the caller got, in words


def ended_rows(reading: ConsoleReading, after: int, most: int) -> tuple[int, list[EndedCall]]:
    """The serial of the first row, and up to `most` calls that ended after the one of serial `after`."""
    first, ended = reading.ended.after(after, most)
    names = reading.names if ended else {}
    rows = [
        made_of(
            EndedCall,
            record,
            serial=serial,
            ended=reading.unix(at) or 0.0,
            engine=names.get(record.engine, record.engine),
            outcome=record.outcome.value,
            queue=round(record.queue, 4),
            ttft=round(record.ttft, 4),
            total=round(record.total, 4),
            predicted_wait=round(record.predicted_wait, 3),
            trace_id="" if record.trace_id is UNSET else record.trace_id,
            kind=kind_of(record.outcome),
            got=got(record.outcome, record.status),
        )
        for serial, (at, record) in enumerate(ended, first)
    ]
    return first, rows


def life_of(serial: int, ended: EndedCalls, dispatch: Dispatch) -> list[Step] | None:
    """The life of the call of that serial; None: it is not kept, or has not ended."""
    first, found = ended.after(serial - 1, 1)
    if first != serial or not found:
        return None
    ((at, record),) = found
    engine = dispatch.fleet.named(record.engine)
    name = record.engine if engine is None else engine.label
    target = dispatch.policy.classes.get(record.class_name)
    return life(record, at, name, target, _beside(record.model, at - record.total, ended, dispatch))


def _beside(model: str, since: float, ended: EndedCalls, dispatch: Dispatch) -> Iterator[Beside]:
    """Calls of the model that had not ended by `since`."""
    for at, record in ended.since(since):
        if record.model == model:
            yield beside_of(at, record)
    for hold, call in dispatch.holds.items():
        if call.model == model:
            yield Beside(call.tenant, call.class_name, call.arrived, hold.taken_at, None, hold.tokens)
    for ticket in dispatch.queues.get(model, ()):
        call = ticket.call
        yield Beside(call.tenant, call.class_name, call.arrived, None, None, call.cost)
