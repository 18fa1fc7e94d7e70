"""Figures of each class, made of the calls that ended lately and of those under way: rates, times, goodput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from gateway.core.policy.traffic import TrafficClass
from gateway.core.quantile import nearest_rank
from gateway.core.request.outcome import Outcome, kind_of
from gateway.core.request.record import Record

WINDOW = 10.0  # seconds


class ClassFigures(msgspec.Struct, kw_only=True):
    """Figures of one class over the last WINDOW. Rates are calls per second, times seconds. Goodput is tokens per
    second of the answers that kept the class's targets. `in_time`: their share of the calls that were answered; None:
    no call was. `ttft_*`: of streams alone. `offered`: calls that came; `admitted`: calls that got an engine; the
    others count calls that ended."""

    offered: float = 0.0
    admitted: float = 0.0
    answered: float = 0.0
    refused: float = 0.0
    failed: float = 0.0
    caller: float = 0.0
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    in_time: float | None = None
    goodput: float = 0.0


class Open(msgspec.Struct, frozen=True, gc=False):
    """Call under way. `arrived` and `admitted` (got its engine; None: it waits) in monotonic seconds."""

    class_name: str
    arrived: float
    admitted: float | None


def class_figures(
    ended: Iterable[tuple[float, Record]],
    open: Iterable[Open],
    classes: Mapping[str, TrafficClass],
    seconds: float,
    now: float,
) -> dict[str, ClassFigures]:
    """Figures by class. `ended`: the calls that ended in the last `seconds`; `open`: the calls under way."""
    since = now - seconds
    offered: Counter[str] = Counter()
    admitted: Counter[str] = Counter()
    records: dict[str, list[Record]] = {}
    for at, record in ended:
        name, arrived = record.class_name, at - record.total
        records.setdefault(name, []).append(record)
        offered[name] += arrived > since
        admitted[name] += bool(record.engine) and arrived + record.queue > since
    for call in open:
        offered[call.class_name] += call.arrived > since
        admitted[call.class_name] += call.admitted is not None and call.admitted > since
    found = {name: _figures(records.get(name, []), classes.get(name), seconds) for name in offered}
    for name, figures in found.items():
        figures.offered, figures.admitted = round(offered[name] / seconds, 1), round(admitted[name] / seconds, 1)
    return found


def _figures(records: list[Record], target: TrafficClass | None, seconds: float) -> ClassFigures:
    found = ClassFigures()
    for record in records:
        kind = kind_of(record.outcome)
        setattr(found, kind, getattr(found, kind) + 1)
    answered = [record for record in records if record.outcome is Outcome.OK]
    if answered:
        ttfts = sorted([record.ttft for record in answered if record.stream])
        if ttfts:
            found.ttft_p50, found.ttft_p99 = round(nearest_rank(ttfts, 0.5), 3), round(nearest_rank(ttfts, 0.99), 3)
        in_time = [record for record in answered if _in_time(record, target)]
        found.in_time = round(len(in_time) / len(answered), 4)
        found.goodput = round(sum([record.completion_tokens for record in in_time]) / seconds, 1)
    for kind in ("answered", "refused", "failed", "caller"):
        setattr(found, kind, round(getattr(found, kind) / seconds, 1))
    return found


def _in_time(record: Record, target: TrafficClass | None) -> bool:
    """Whether a call met its class's targets. The time to the first token is known of streams only."""
    if target is None:
        return True
    ttft = not record.stream or target.ttft is None or record.ttft <= target.ttft
    return ttft and record.total <= target.deadline
