"""Headline of the console: who is refused, why, and what to change, in words.

Pure: it is made of the calls of the last minute and of what is wrong with policy and engines now, which comes first.
Other lines are sorted by their calls: one for each model without room for what is offered, with the engines that are
missing, and one for calls of one class, tenant and model that one change would help. Lines of which no call is of the
last seconds say so, and come later: what is shown beside them is of now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from gateway.control.console.figures import WINDOW
from gateway.control.console.remedy import ROOM, Key, ModelState, remedy
from gateway.core.policy.traffic import TrafficClass
from gateway.core.request.outcome import STATUS, Outcome, got, kind_of
from gateway.core.request.record import Record

MINUTE = 60.0  # seconds
LINES = 6  # of calls
OVERLOAD = 0.05  # share of a model's calls that found no room: less is a burst, and told of its class alone
WHOSE = {Outcome.UPSTREAM: "The engine said", Outcome.TRUNCATED: "The last of them"}  # reasons, where not told
STRAY = (Outcome.NOT_FOUND, Outcome.METHOD_NOT_ALLOWED)
STRAYS = 100  # requests a minute of unknown callers for paths that are not there, which are worth a line
RUNBOOKS = {  # of calls that ended so
    **dict.fromkeys(ROOM, "WeirCallsWithoutRoom"),
    Outcome.NO_ENGINE: "WeirEngineDown",
    Outcome.MODEL_UNAVAILABLE: "WeirStartFailing",
    Outcome.UPSTREAM: "WeirBreakerOpen",
    Outcome.TRUNCATED: "WeirBreakerOpen",
    Outcome.BUG: "WeirCallsEndInBugs",
}
GROUPS = 1000  # that are told apart; clients choose models' names


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Headline: one problem, or the statement that all is well."""

    level: Literal["bad", "warn", "good"]
    what: str  # what happens, in a sentence
    why: str = ""
    change: str = ""  # what to do
    since: float | None = None  # when it began, Unix seconds; None: nobody knows
    calls: int = 0  # that it is of
    model: str = ""  # the overloaded one
    engines: tuple[str, ...] = ()  # names of those to look at
    runbook: str = ""  # section of docs/runbooks.md


CUT = {  # reasons of calls that ended early: a word in the record, a sentence in the answer
    "deadline": "Its deadline passed before the end of the answer.",
    "drain": "This gateway is shutting down.",
}

NONE_NOW = f", none of them in the last {WINDOW:.0f} s"


class Group:
    """Calls of one class, tenant and model that one change would help: the number of each outcome and of each status
    sent, the last reason for each outcome, and when the first and the last of all ended."""

    def __init__(self, key: Key, last: float) -> None:
        self.key = key
        self.last = self.first = last
        self.engines: Counter[str] = Counter()
        self.outcomes: Counter[Outcome] = Counter()
        self.ways: Counter[tuple[int, Outcome]] = Counter()
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
    *,
    lately: float,
    classes: Mapping[str, TrafficClass],
    names: Mapping[str, str],
    since: Callable[[str, Outcome, float], float | None] = lambda _tenant, _outcome, first: first,
) -> list[Line]:
    """The lines, the most urgent first; one where all is well. `ended`: the calls of the last `seconds`, the newest
    first; `conditions`: what is wrong whatever calls there are; `queued`: calls that wait now; `capped`: classes that
    run as many calls as their max_concurrency; `lately`: when the last WINDOW began; `classes`: the policy's;
    `names`: those of the engines, by their ids; `since`: when a tenant's calls began to end so, Unix seconds, of the
    first one that is among `ended`."""
    groups, offered, by_model = _grouped(ended)
    total = by_model.total()
    span = "minute" if seconds >= MINUTE else f"{seconds:.0f} s"
    ranked = sorted(groups, key=lambda group: -group.calls)
    refused = [group for group in ranked if kind_of(group.outcome) in ("refused", "failed")]
    callers = [group for group in ranked if _callers_mistake(group)]
    began = [(group, since(group.key[1], group.outcome, group.first)) for group in refused]
    lines = list(_overloads(began, models, by_model, capped, span, lately))
    short = {line.model for line in lines}
    for group in refused[:LINES] + callers[:1]:
        state = models.get(group.key[2])
        had = [(names.get(engine, engine), calls) for engine, calls in group.engines.most_common(3)]
        engines = ", ".join([f"{name} ({calls})" for name, calls in had])
        lacks = group.key[2] in short
        change = remedy(group.key, group.outcome, state, capped, classes, short=lacks, engines=engines)
        line = _line(group, offered[group.key], state, span, change, over=group.last < lately)
        at_fault = tuple([name for name, _ in had]) if kind_of(group.outcome) == "failed" else ()
        lines.append(
            msgspec.structs.replace(line, since=since(group.key[1], group.outcome, group.first), engines=at_fault)
        )
    lines.sort(key=lambda line: (line.level != "bad", -line.calls))  # an overload has no fewer than what it explains
    lines = sorted([*conditions, *lines], key=lambda line: line.level != "bad")
    if not lines:
        what = (
            f"No call of the last {span} was refused: {total} ended." if total else f"No call ended in the last {span}."
        )
        what += f" {queued} wait now." if queued else ""
        lines = [Line(level="good", what=what, calls=total)]
    return lines


def _grouped(ended: Iterable[tuple[float, Record]]) -> tuple[list[Group], Counter[Key], Counter[str]]:
    """Groups of calls, the calls in them by key, and all calls by model."""
    groups: dict[tuple[Key, Outcome], Group] = {}
    offered: Counter[Key] = Counter()
    by_model: Counter[str] = Counter()
    for at, record in ended:
        by_model[record.model] += 1
        key = record.class_name, record.tenant, record.model
        found = key, Outcome.QUEUE_FULL if record.outcome in ROOM else record.outcome
        group = groups.get(found)
        if group is None:
            if len(groups) >= GROUPS:
                continue
            group = groups[found] = Group(key, at)
        group.first = at
        group.outcomes[record.outcome] += 1
        if record.engine:
            group.engines[record.engine] += 1
        group.ways[record.status, record.outcome] += 1
        group.reasons.setdefault(record.outcome, CUT.get(record.reason, record.reason))
        offered[key] += 1
    return list(groups.values()), offered, by_model


def _overloads(
    refused: Iterable[tuple[Group, float | None]],
    models: Mapping[str, ModelState],
    by_model: Mapping[str, int],
    capped: Container[str],
    span: str,
    lately: float,
) -> Iterator[Line]:
    """A line for each model whose engines have no room for what is offered, and that more engines would help.
    `refused`: groups, and since when their calls end so."""
    short: Counter[str] = Counter()
    last: dict[str, float] = {}
    since: dict[str, float] = {}
    for group, began in refused:
        name, _, model = group.key
        if group.outcome in ROOM and name not in capped:
            short[model] += group.calls
            last[model] = max(last.get(model, group.last), group.last)
            if began is not None:
                since[model] = min(since.get(model, began), began)
    for model, calls in short.most_common(LINES):
        state = models.get(model)
        if state is None or not 0 < state.engines < state.wanted or calls < OVERLOAD * by_model[model]:
            continue
        missing = state.wanted - state.engines
        over = last[model] < lately
        what = f"Overload: {calls} of {by_model[model]} calls of the last {span} for model {model} found no room"
        yield Line(
            level="warn" if over else "bad",
            what=f"{what}{NONE_NOW if over else ''}.",
            since=since.get(model),
            why=f"More was offered than its engines can do. Now {state.full}, and {state.queued} calls wait.",
            change=f"Add {_engines(missing)} of {model}: what was offered of late wants {state.wanted}, and "
            f"{state.engines} {'serves' if state.engines == 1 else 'serve'} it.",
            calls=calls,
            model=model,
            runbook="WeirCallsWithoutRoom",
        )


def _engines(number: int) -> str:
    return "1 engine" if number == 1 else f"{number} engines"


def _callers_mistake(group: Group) -> bool:
    """A few requests of unknown callers for paths that are not there are nobody's trouble: probes and scanners."""
    outcome = group.outcome
    if kind_of(outcome) != "caller" or outcome in (Outcome.CLIENT_GONE, Outcome.SLOW_CLIENT):
        return False
    return bool(group.key[1]) or outcome not in STRAY or group.calls >= STRAYS


def _line(group: Group, offered: int, state: ModelState | None, span: str, change: str, *, over: bool) -> Line:
    class_name, tenant, model = group.key
    outcome = group.outcome
    who = f"Class {class_name} of" if class_name else "Calls of"
    who += f" tenant {tenant}" if tenant else " unknown callers"
    who += f", model {model}" if model else ""
    kind = kind_of(outcome)
    how = "failed" if kind == "failed" else "were refused"
    ways = [(_way(each, status or STATUS[each].status), calls) for (status, each), calls in group.ways.most_common()]
    told = " " + ways[0][0] if len(ways) == 1 else ": " + ", ".join([f"{calls} {way}" for way, calls in ways])
    what = f"{who}: {group.calls} of {offered} calls of the last {span} {how}{told}{NONE_NOW if over else ''}."
    said = WHOSE.get(outcome, "The last was told")
    why = f"{said}: {group.reasons[outcome]}" if group.reasons[outcome] else ""
    if state is not None and state.mode != "normal" and outcome is Outcome.SHED:
        why = f"{why} {model} is in mode {state.mode}: {state.why}.".strip()
    level: Literal["bad", "warn"] = "warn" if kind == "caller" or over else "bad"
    runbook = RUNBOOKS.get(outcome, "")
    return Line(level=level, what=what, why=why, change=change, calls=group.calls, runbook=runbook)


def _way(outcome: Outcome, status: int) -> str:
    """Phrase for how calls ended, as seen by their callers."""
    return f"{'after' if status < 400 else 'with'} {got(outcome, status)}"
