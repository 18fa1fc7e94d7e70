"""Headline of the console: who is refused, why, and what to change, in words.

Pure: it is made of the calls of the last minute and of what is wrong with policy and engines now, which comes first.
Other lines are sorted by their calls: one for each model without room for what is offered, with the engines that are
missing, and one for calls of one class, tenant and model that one change would help.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from gateway.control.console.figures import kind_of
from gateway.core.request.outcome import STATUS, Outcome
from gateway.core.request.record import Record

MINUTE = 60.0  # seconds
LINES = 6  # of calls
OVERLOAD = 0.05  # share of a model's calls that found no room: less is a burst, and told of its class alone
GROUPS = 1000  # that are told apart; clients choose models' names


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """`what` happens, in a sentence, `why`, and what to `change`. `calls`: how many it is of; `model`: the one that is
    overloaded."""

    level: Literal["bad", "warn", "good"]
    what: str
    why: str = ""
    change: str = ""
    calls: int = 0
    model: str = ""


class ModelState(msgspec.Struct, frozen=True):
    """The mode of a model, and why it is in it. `engines` that may be given its calls, and `wanted` by the scaling
    signal; `full`: what these engines hold, in words; `queued` calls wait for it."""

    mode: str
    why: str
    engines: int = 0
    wanted: int = 0
    full: str = ""
    queued: int = 0


ROOM = (Outcome.QUEUE_FULL, Outcome.SHED, Outcome.HOPELESS, Outcome.EXPIRED)  # more room would have helped
CUT = {  # reasons of calls that ended early: a word in the record, a sentence in the answer
    "deadline": "Its deadline passed before the end of the answer.",
    "drain": "This gateway is shutting down.",
}

Key = tuple[str, str, str]  # class, tenant, model


class Group:
    """Calls of one class, tenant and model that one change would help: how many of each outcome, and what the last of
    each was told."""

    __slots__ = ("key", "outcomes", "reasons")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.outcomes: Counter[Outcome] = Counter()
        self.reasons: dict[Outcome, str] = {}

    @property
    def outcome(self) -> Outcome:
        """The most frequent one."""
        return self.outcomes.most_common(1)[0][0]

    @property
    def calls(self) -> int:
        return self.outcomes.total()


def headline(
    ended: Iterable[tuple[float, Record]],
    models: Mapping[str, ModelState],
    conditions: Sequence[Line],
    seconds: float,
    queued: int,
    capped: Container[str] = (),
) -> list[Line]:
    """The lines, the most urgent first; one where all is well. `ended`: the calls of the last `seconds`, the newest
    first; `conditions`: what is wrong whatever calls there are; `queued`: calls that wait now; `capped`: classes that
    run as many calls as their max_concurrency."""
    groups: dict[tuple[Key, Outcome], Group] = {}
    offered: Counter[Key] = Counter()
    by_model: Counter[str] = Counter()
    total = 0
    for _, record in ended:
        total += 1
        by_model[record.model] += 1
        key = record.class_name, record.tenant, record.model
        found = key, Outcome.QUEUE_FULL if record.outcome in ROOM else record.outcome
        if found not in groups:
            if len(groups) >= GROUPS:
                continue
            groups[found] = Group(key)
        groups[found].outcomes[record.outcome] += 1
        offered[key] += 1
        groups[found].reasons.setdefault(record.outcome, CUT.get(record.reason, record.reason))
    span = "minute" if seconds >= MINUTE else f"{seconds:.0f} s"
    ranked = sorted(groups.values(), key=lambda group: -group.calls)
    refused = [group for group in ranked if kind_of(group.outcome) in ("refused", "failed")]
    callers = [group for group in ranked if _callers_mistake(group.outcome)]
    lines = list(_overloads(refused, models, by_model, capped, span))
    short = {line.model for line in lines}
    for group in refused[:LINES] + callers[:1]:
        state = models.get(group.key[2])
        change = _change(group, state, capped, short=group.key[2] in short)
        lines.append(_line(group, offered[group.key], state, span, change))
    lines.sort(key=lambda line: (line.level != "bad", -line.calls))  # an overload has no fewer than what it explains
    lines = sorted([*conditions, *lines], key=lambda line: line.level != "bad")
    if not lines:
        what = (
            f"No call of the last {span} was refused: {total} ended." if total else f"No call ended in the last {span}."
        )
        what += f" {queued} wait now." if queued else ""
        lines = [Line(level="good", what=what, calls=total)]
    return lines


def _overloads(
    refused: Sequence[Group],
    models: Mapping[str, ModelState],
    by_model: Mapping[str, int],
    capped: Container[str],
    span: str,
) -> Iterator[Line]:
    """A line for each model whose engines have no room for what is offered, and that more engines would help."""
    short: Counter[str] = Counter()
    for group in refused:
        name, _, model = group.key
        if group.outcome in ROOM and name not in capped:
            short[model] += group.calls
    for model, calls in short.most_common(LINES):
        state = models.get(model)
        if state is None or not 0 < state.engines < state.wanted or calls < OVERLOAD * by_model[model]:
            continue
        missing = state.wanted - state.engines
        yield Line(
            level="bad",
            what=f"Overload: {calls} of {by_model[model]} calls of the last {span} for model {model} found no room.",
            why=f"More was offered than its engines can do. Now {state.full}, and {state.queued} calls wait.",
            change=f"Add {_engines(missing)} of {model}: what was offered of late wants {state.wanted}, and "
            f"{state.engines} {'serves' if state.engines == 1 else 'serve'} it.",
            calls=calls,
            model=model,
        )


def _engines(number: int) -> str:
    return "1 engine" if number == 1 else f"{number} engines"


def _callers_mistake(outcome: Outcome) -> bool:
    return kind_of(outcome) == "caller" and outcome not in (Outcome.CLIENT_GONE, Outcome.SLOW_CLIENT)


def _line(group: Group, offered: int, state: ModelState | None, span: str, change: str) -> Line:
    class_name, tenant, model = group.key
    outcome = group.outcome
    who = f"Class {class_name} of" if class_name else "Calls of"
    who += f" tenant {tenant}" if tenant else " unknown callers"
    who += f", model {model}" if model else ""
    kind = kind_of(outcome)
    how = "failed" if kind == "failed" else "were refused"
    ways = [(f"with {STATUS[each].status} ({each.value})", calls) for each, calls in group.outcomes.most_common()]
    told = " " + ways[0][0] if len(ways) == 1 else ": " + ", ".join([f"{calls} {way}" for way, calls in ways])
    what = f"{who}: {group.calls} of {offered} calls of the last {span} {how}{told}."
    why = f"The last was told: {group.reasons[outcome]}" if group.reasons[outcome] else ""
    if state is not None and state.mode != "normal" and outcome is Outcome.SHED:
        why = f"{why} {model} is in mode {state.mode}: {state.why}.".strip()
    level: Literal["bad", "warn"] = "warn" if kind == "caller" else "bad"
    return Line(level=level, what=what, why=why, change=change, calls=group.calls)


def _change(group: Group, state: ModelState | None, capped: Container[str], *, short: bool) -> str:  # noqa: PLR0912 # a table
    """`short`: the engines that the model lacks are told already."""
    class_name, tenant, model = group.key
    outcome = group.outcome
    if outcome in ROOM and class_name in capped:
        return f"Raise classes.{class_name}.max_concurrency: the class runs as many calls as that allows."
    more = "add the engines named above" if short else f"add an engine of {model or 'its model'}"
    match outcome:
        case Outcome.RATE_LIMITED:
            return (
                f"The engines are not the cause. Raise the limit that is named (limits, or tenants.{tenant}.limits), "
                f"or have {tenant} send less."
            )
        case Outcome.QUEUE_FULL:
            return f"To serve them, {more}. To let more wait, as after a burst, raise classes.{class_name}.max_queue."
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
