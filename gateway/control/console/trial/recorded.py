"""Calls just recorded, as a load of `gateway simulate`: a trace of their times and tokens, and a scenario beside it.

Pure. The trace has each call that was judged: answered, refused for want of room, time or a limit, or failed. What the
caller alone could mend is left out. A call without a counted answer gets the median of its class. Classes with models,
and tenants, are drawn by their shares of the recorded calls: a trace has no column for them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from statistics import median_low

import msgspec

from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.core.request.tenants import ANONYMOUS

MODEL = re.compile(r"[!-~]{1,200}")  # as a scenario names it
KINDS = 50  # (class, model) and tenants that are told apart: those with most calls
UNKNOWN = 128  # tokens of an answer where none of any class was counted
TAKEN = frozenset({
    Outcome.OK, Outcome.RATE_LIMITED, Outcome.QUEUE_FULL, Outcome.SHED, Outcome.NO_ENGINE, Outcome.DEADLINE_UNREACHABLE,
    Outcome.EXPIRED, Outcome.UPSTREAM, Outcome.TRUNCATED, Outcome.MODEL_UNAVAILABLE, Outcome.DRAINING,
    Outcome.CLIENT_GONE,
})  # fmt: skip


class Recorded(msgspec.Struct, frozen=True):
    """`calls` of the last `seconds`, with the files' contents."""

    calls: int
    seconds: float
    trace: bytes
    scenario: bytes


def recorded(ended: Iterable[tuple[float, Record]]) -> Recorded | None:
    """The load of these calls, each with the moment that it ended; None: none of them was judged."""
    taken = [
        (at - record.total, record)
        for at, record in ended
        if record.outcome in TAKEN and record.class_name and record.prompt_tokens and MODEL.fullmatch(record.model)
    ]
    if not taken:
        return None
    taken.sort(key=lambda each: each[0])
    answers: dict[str, list[int]] = {}
    for _, record in taken:
        if record.settled:
            answers.setdefault(record.class_name, []).append(max(1, record.completion_tokens))
    usual = {name: median_low(tokens) for name, tokens in answers.items()}
    any_ = median_low([tokens for each in answers.values() for tokens in each]) if answers else UNKNOWN
    first = taken[0][0]
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for arrived, record in taken:
        when = datetime.fromtimestamp(arrived - first, UTC).replace(tzinfo=None)
        answer = max(1, record.completion_tokens) if record.settled else usual.get(record.class_name, any_)
        lines.append(f"{when.isoformat(sep=' ', timespec='microseconds')},{record.prompt_tokens},{answer}")
    scenario = msgspec.json.encode(_scenario([record for _, record in taken]))  # JSON is YAML
    return Recorded(len(taken), taken[-1][0] - first, "\n".join([*lines, ""]).encode(), scenario)


def _scenario(records: list[Record]) -> object:
    kinds = Counter((record.class_name, record.model) for record in records).most_common(KINDS)
    tenants = Counter(record.tenant for record in records).most_common(KINDS)
    sent = {"prompt": "trace", "output": "trace", "ignore_eos": True}
    workload: dict[str, object] = {
        "mix": [{"class": name, "model": model, "share": float(calls), **sent} for (name, model), calls in kinds]
    }
    if [name for name, _ in tenants] != [ANONYMOUS]:
        all_ = sum([calls for _, calls in tenants])
        workload["tenants"] = {
            name: {"weight": max(0.01, round(1000.0 * calls / all_, 2))} for name, calls in tenants if name
        }
    return {"arrivals": "trace", "trace": {"file": "calls.csv"}, "retries": 0, "workload": workload}
