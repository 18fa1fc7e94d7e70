"""List of waiting and running calls as JSON, for GET /calls. Bounded, the newest first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from heapq import nsmallest
from typing import Literal

import msgspec

from gateway.relay.active_call import ActiveCall

SHOWN = 1000  # calls in one answer


class CallView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Call that has not ended. `state`: in a queue, on an engine without a first byte, or past it. `deadline_s`:
    seconds left until its deadline, negative once it has passed. While the call is queued, `engine` is null and
    `held_tokens` are the tokens that it will hold."""

    request_id: str
    tenant: str
    class_name: str = msgspec.field(name="class")
    model: str
    engine: str | None
    state: Literal["queued", "running", "streaming"]
    age_s: float
    deadline_s: float
    held_tokens: int
    attempts: int


def active_calls(live: Iterable[ActiveCall], labels: Mapping[str, str], now: float) -> Iterator[CallView]:
    """Calls of a pipeline of this process; those that are not parsed yet are left out. `labels`: engines' names by id,
    where these differ."""
    for each in live:
        record = each.record
        if each.call is not None:
            yield CallView(
                request_id=record.request_id,
                tenant=record.tenant,
                class_name=each.call.class_name,
                model=record.model,
                engine=labels.get(record.engine, record.engine) or None,
                state="streaming" if record.ttft else "running" if record.engine else "queued",
                age_s=round(now - each.call.arrived, 3),
                deadline_s=round(each.call.deadline - now, 3),
                held_tokens=each.call.cost,
                attempts=record.attempts,
            )


def calls_view(calls: Iterable[CallView]) -> dict[str, object]:
    """View of these calls: their number, and the SHOWN youngest of them."""
    found = list(calls)
    return {"total": len(found), "calls": nsmallest(SHOWN, found, key=lambda call: call.age_s)}
