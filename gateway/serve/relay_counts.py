"""Totals of a relay, which it reports to its decider."""

from __future__ import annotations

from gateway.batches.door import BatchDoor
from gateway.core.call_counts import CallCounts
from gateway.core.request.body_memory import BodyMemory
from gateway.frames.messages import RelayCounts
from gateway.relay.batcher import Batcher
from gateway.relay.wire.server import Server


def relay_counts(
    calls: CallCounts,
    server: Server,
    bodies: BodyMemory,
    batcher: Batcher,
    batches: BatchDoor | None,
    *,
    lost_lines: int,
    lost_spans: int = 0,
) -> RelayCounts:
    """Return the totals since the start. `batches` None: the Batch API is not offered."""
    return RelayCounts(
        calls=calls.told(),
        ended=calls.calls,
        connections=server.connections,
        body_bytes=bodies.held,
        refusals=server.refusals,
        body_refusals=bodies.refused,
        batches=batcher.batches,
        merged=batcher.merged,
        again=batcher.again,
        lost_lines=lost_lines,
        lost_spans=lost_spans,
        lines={} if batches is None else dict(batches.lines),
        line_calls=0 if batches is None else batches.line_calls,
        batch_states={} if batches is None else batches.batch_states,
    )
