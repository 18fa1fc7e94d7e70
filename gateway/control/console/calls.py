"""Ended calls for the console: as rows of its list, and each as its life."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import UNSET

from gateway.control.console.life import Beside, Step, beside_of, life
from gateway.control.console.reading import ConsoleReading
from gateway.core.request.outcome import got, kind_of
from gateway.core.request.record import Record
from gateway.decider.dispatch import Dispatch
from gateway.decider.ended_calls import EndedCalls


def ended_rows(reading: ConsoleReading, after: int, most: int) -> tuple[int, list[list[object]]]:
    """The serial of the first row, and up to `most` calls that ended after the one of serial `after`."""
    first, ended = reading.ended.after(after, most)
    names = reading.names if ended else {}
    return first, [_row(serial, reading.unix(at), record, names) for serial, (at, record) in enumerate(ended, first)]


def _row(serial: int, ended: float | None, record: Record, names: Mapping[str, str]) -> list[object]:
    """Ended call with the columns of NAMES in `web/calls.js`. `ended`: Unix seconds. Other times are seconds from the
    first byte of its request. `names`: of engines, by their ids."""
    outcome = record.outcome
    return [
        serial, ended or 0.0, record.request_id, record.tenant, record.class_name, record.model,
        names.get(record.engine, record.engine), outcome.value, record.status, record.reason,
        round(record.queue, 4), round(record.ttft, 4), round(record.total, 4),
        record.prompt_tokens, record.completion_tokens, record.cached_tokens, record.held_tokens,
        round(record.predicted_wait, 3), record.affinity_tokens, record.shaped_tokens, record.attempts,
        record.stream, record.settled, record.route, "" if record.trace_id is UNSET else record.trace_id,
        kind_of(outcome), got(outcome, record.status),
    ]  # fmt: skip


def life_of(serial: int, ended: EndedCalls, dispatch: Dispatch) -> list[Step] | None:
    """The life of the call with this serial; None: the call is not kept, or has not ended."""
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
    for hold, grant in dispatch.holds.items():
        call = grant.call
        if call.model == model:
            yield Beside(call.tenant, call.class_name, call.arrived, hold.taken_at, None, hold.tokens)
    for ticket in dispatch.queues.get(model, ()):
        call = ticket.call
        yield Beside(call.tenant, call.class_name, call.arrived, None, None, call.cost)
