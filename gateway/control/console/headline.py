"""Headline of the console: who is refused, why, and what to change, in words.

Pure: it is made of the calls of the last minute and of what is wrong with policy and engines now. A line names calls
of one class, tenant and model that ended in one way; those that cost most calls come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from gateway.control.console.figures import kind_of
from gateway.core.request.outcome import STATUS, Outcome
from gateway.core.request.record import Record

MINUTE = 60.0  # seconds
LINES = 6  # of calls
GROUPS = 1000  # (class, tenant, model, outcome) that are told apart; clients choose models' names


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """`what` happens, in a sentence, `why`, and what to `change`. `calls`: how many it is of."""

    level: Literal["bad", "warn", "good"]
    what: str
    why: str = ""
    change: str = ""
    calls: int = 0


class ModelState(msgspec.Struct, frozen=True):
    """The mode of a model, and why it is in it."""

    mode: str
    why: str


Group = tuple[str, str, str, Outcome]  # class, tenant, model


def headline(
    ended: Iterable[tuple[float, Record]],
    models: Mapping[str, ModelState],
    conditions: Sequence[Line],
    seconds: float,
    queued: int,
) -> list[Line]:
    """The lines, the most urgent first; one where all is well. `ended`: the calls of the last `seconds`, the newest
    first; `conditions`: what is wrong whatever calls there are; `queued`: calls that wait now."""
    counts: Counter[Group] = Counter()
    offered: Counter[tuple[str, str, str]] = Counter()
    reasons: dict[Group, str] = {}
    total = 0
    for _, record in ended:
        total += 1
        key = record.class_name, record.tenant, record.model
        group = *key, record.outcome
        if group not in counts and len(counts) >= GROUPS:
            continue
        counts[group] += 1
        offered[key] += 1
        reasons.setdefault(group, record.reason)
    found = [(group, calls) for group, calls in counts.items() if kind_of(group[3]) in ("refused", "failed")]
    callers = [(group, calls) for group, calls in counts.items() if _callers_mistake(group[3])]
    found.sort(key=lambda each: -each[1])
    callers.sort(key=lambda each: -each[1])
    lines = [_line(group, calls, offered[group[:3]], reasons[group], models) for group, calls in found[:LINES]]
    lines += [_line(group, calls, offered[group[:3]], reasons[group], models) for group, calls in callers[:1]]
    lines += conditions
    lines.sort(key=lambda line: line.level != "bad")
    if not lines:
        span = "minute" if seconds >= MINUTE else f"{seconds:.0f} s"
        what = (
            f"No call of the last {span} was refused: {total} ended." if total else f"No call ended in the last {span}."
        )
        what += f" {queued} wait now." if queued else ""
        lines = [Line(level="good", what=what, calls=total)]
    return lines


def _callers_mistake(outcome: Outcome) -> bool:
    return kind_of(outcome) == "caller" and outcome not in (Outcome.CLIENT_GONE, Outcome.SLOW_CLIENT)


def _line(group: Group, calls: int, offered: int, why: str, models: Mapping[str, ModelState]) -> Line:
    class_name, tenant, model, outcome = group
    who = f"{class_name or 'calls'} of tenant {tenant}" if tenant else f"{class_name or 'calls'} of unknown callers"
    who += f" for {model}" if model else ""
    kind, status = kind_of(outcome), STATUS[outcome].status
    how = "fails with" if kind == "failed" else "is refused with"
    what = f"{who} {how} {status} ({outcome.value}): {calls} of {offered} calls in the last minute."
    state = models.get(model)
    if state is not None and state.mode != "normal" and outcome is Outcome.SHED:
        why = f"{why} {model} is in mode {state.mode}: {state.why}.".strip()
    level: Literal["bad", "warn"] = "warn" if kind == "caller" else "bad"
    return Line(level=level, what=what, why=why, change=_change(group, state), calls=calls)


def _change(group: Group, state: ModelState | None) -> str:  # noqa: PLR0912 # a table, one row an outcome
    class_name, tenant, model, outcome = group
    more = f"add an engine of {model or 'its model'}"
    match outcome:
        case Outcome.RATE_LIMITED:
            return (
                f"The engines are not the cause. Raise the limit that is named (limits, or tenants.{tenant}.limits), "
                f"or have {tenant} send less."
            )
        case Outcome.QUEUE_FULL:
            return f"To serve them, {more}. To let more wait, raise classes.{class_name}.max_queue."
        case Outcome.SHED if state is not None and state.mode != "normal":
            return f"To serve them, {more}. To shed later, change modes.{state.mode} in the policy."
        case Outcome.SHED:
            return f"To serve them, {more}. To let them go before others, raise classes.{class_name}.weight."
        case Outcome.HOPELESS:
            return (
                f"To serve them, {more}. Else give the class more time (classes.{class_name}.ttft or deadline) or a "
                f"larger share (classes.{class_name}.weight)."
            )
        case Outcome.EXPIRED:
            return f"To be in time, {more}. Else give them more time: classes.{class_name}.deadline, or the caller's."
        case Outcome.NO_ENGINE:
            return f"Bring an engine of {model or 'the model'} back: the engines below say what each of them met."
        case Outcome.MODEL_UNAVAILABLE:
            return f"Load {model} below, or make room for it: its sidecar says what is in the way."
        case Outcome.DRAINING:
            return "End the drain below, or let the balancer send calls elsewhere."
        case Outcome.UPSTREAM | Outcome.TRUNCATED:
            return "Look at the log of the engine that is named; drain it if it goes on."
        case Outcome.BUG:
            return "This is a bug in the gateway: report it with the request id that Calls shows."
        case Outcome.UNAUTHORIZED:
            return "The callers need a key that this gateway knows: gateway key add TENANT --policy FILE."
        case Outcome.FORBIDDEN:
            return f"Allow it in the policy (tenants.{tenant}.models or best_class), or have {tenant} ask for another."
        case _:
            return "The callers must change what they send: the reason says what."
