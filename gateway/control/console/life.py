"""Life of an ended call in words: each decision about it, and the reason.

Pure. Why it waited is told by the calls beside it: those of its model that were given an engine between its arrival
and its own turn went first, and the KV cache that each held meanwhile says who used the room. These are calls that
have ended and are still kept, and those under way: nothing is kept for this of a call, and nothing is done for it
before somebody asks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import msgspec

from gateway.core.policy.traffic import TrafficClass
from gateway.core.request.outcome import Outcome, got
from gateway.core.request.record import Record

LEAST = 0.0005  # seconds; a call that waited less did not wait
NAMED = 3  # tenants and classes that a sentence names


class Beside(msgspec.Struct, frozen=True, gc=False):
    """Another call of the model, ended or under way. Times are monotonic seconds. `admitted` None: the call got no
    engine; `ended` None: it has not ended. `held`: tokens of KV cache."""

    tenant: str
    class_name: str
    arrived: float
    admitted: float | None
    ended: float | None
    held: int


class Step(msgspec.Struct, frozen=True):
    """Step of a call's life. `at`: seconds from the first byte of its request."""

    at: float
    name: str
    words: str


def beside_of(at: float, record: Record) -> Beside:
    """An ended call as it stood beside others; `at`: when it ended."""
    arrived = at - record.total
    admitted = arrived + record.queue if record.engine else None
    return Beside(record.tenant, record.class_name, arrived, admitted, at, record.held_tokens)


def life(
    record: Record, ended: float, engine: str, target: TrafficClass | None, beside: Iterable[Beside]
) -> list[Step]:
    """The steps in order. `ended`: when it did, in monotonic seconds; `engine`: the name of its engine; `target`: its
    class, None: it is gone; `beside`: other calls of its model."""
    return list(_steps(record, ended - record.total, engine, target, beside))


def _steps(
    record: Record, arrived: float, engine: str, target: TrafficClass | None, beside: Iterable[Beside]
) -> Iterator[Step]:
    streamed = ", streamed" if record.stream else ""
    trace = f", trace {record.trace_id}" if isinstance(record.trace_id, str) else ""
    yield Step(0.0, "came", f"{record.method} {record.route}{streamed}, request {record.request_id}{trace}")
    if record.tenant:
        yield Step(0.0, "who pays", f"tenant {record.tenant}")
    if record.class_name:
        words = f"class {record.class_name}, model {record.model}{_targets(target)}"
        yield Step(0.0, "judged", words)
    waited = record.queue if record.engine else record.total
    if record.engine or record.outcome in WAITED:
        yield Step(waited, "waited", _wait(record, waited, _before(record, arrived, waited, beside)))
    if record.engine:
        yield from _at_engine(record, engine, target)
    yield Step(record.total, "ended", f"after {_s(record.total)}; the caller got {got(record.outcome, record.status)}")
    if record.reason:
        yield Step(record.total, "because", record.reason)


# They may have stood in a queue.
WAITED = (
    Outcome.SHED,
    Outcome.EXPIRED,
    Outcome.QUEUE_FULL,
    Outcome.DEADLINE_UNREACHABLE,
    Outcome.CLIENT_GONE,
    Outcome.DRAINING,
)


def _targets(target: TrafficClass | None) -> str:
    if target is None:
        return "; the policy no longer has that class"
    ttft = f"first token within {_s(target.ttft)}, " if target.ttft is not None else ""
    return f": {ttft}whole within {_s(target.deadline)}"


class _Crowd(msgspec.Struct):
    """`ahead`: calls of its own class that waited when it came; `before`: by class, calls that were given an engine
    while it waited, `passed` of them had come later. `shares`: token-seconds of KV cache by class and tenant."""

    ahead: int = 0
    before: Counter[str] = msgspec.field(default_factory=Counter)
    passed: int = 0
    shares: dict[tuple[str, str], float] = msgspec.field(default_factory=lambda: defaultdict(float))


def _before(record: Record, arrived: float, waited: float, beside: Iterable[Beside]) -> _Crowd:
    until, crowd = arrived + waited, _Crowd()
    if waited < LEAST:
        return crowd
    for each in beside:
        admitted, ended = each.admitted, each.ended
        left = ended if admitted is None else admitted
        if each.class_name == record.class_name and each.arrived < arrived and (left is None or left > arrived):
            crowd.ahead += 1
        if admitted is None:
            continue
        if arrived < admitted < until:
            crowd.before[each.class_name] += 1
            crowd.passed += each.arrived > arrived
        both = (until if ended is None else min(until, ended)) - max(arrived, admitted)
        if both > 0.0:
            crowd.shares[each.class_name, each.tenant] += both * each.held
    return crowd


def _wait(record: Record, waited: float, crowd: _Crowd) -> str:
    if waited < LEAST:
        return "not at all: an engine had room" if record.engine else "not at all: it was judged as it came"
    words = _s(waited)
    words += f" ({_s(record.predicted_wait)} were predicted)" if record.predicted_wait else ""
    words += f": {crowd.ahead} of its class ahead" if crowd.ahead else ": nothing had room for it"
    if crowd.before:
        named = [f"{calls} of {name}" for name, calls in crowd.before.most_common(NAMED)]
        words += f"; meanwhile {' and '.join(named)} went first"
        words += f", {crowd.passed} of which had come later" if crowd.passed else ""
    whole = sum(crowd.shares.values())
    if whole:
        most = sorted(crowd.shares.items(), key=lambda each: -each[1])[:NAMED]
        named = [f"{share / whole:.0%} by {name} of {tenant or 'nobody known'}" for (name, tenant), share in most]
        words += f"; the room was used {', '.join(named)}"
    return words


def _at_engine(record: Record, engine: str, target: TrafficClass | None) -> Iterator[Step]:
    words = f"{engine}, where {record.held_tokens} tokens of KV cache were held for it"
    words += (
        f"; about {record.affinity_tokens} tokens of its prompt were cached there" if record.affinity_tokens else ""
    )
    words += f"; {record.attempts} attempts were made" if record.attempts > 1 else ""
    yield Step(record.queue, "engine", words)
    if record.shaped_tokens:
        words = f"its answer may be {record.shaped_tokens} tokens shorter than asked (shaping), as engines were full"
        yield Step(record.queue, "shaped", words)
    if record.ttft:
        words = f"{_s(record.ttft - record.queue)} after it was sent"
        if record.stream and target is not None and target.ttft is not None:
            late = record.ttft - target.ttft
            words += f"; {_s(late)} later than its class's target" if late > 0 else ", in time for its class"
        yield Step(record.ttft, "first byte", words)
    words = f"{record.prompt_tokens} of the prompt ({record.cached_tokens} cached), {record.completion_tokens} written"
    yield Step(record.total, "tokens", words + (", as the engine counted" if record.settled else ", estimated"))


def _s(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.{1 if seconds < 100 else 0}f} s"
