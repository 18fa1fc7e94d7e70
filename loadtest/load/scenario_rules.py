"""Rules over several fields of a scenario, each with the field at fault: a well-formed file that cannot be run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from gateway.shared.files.checked import Fault, Path, nearest
from loadtest.load.arrivals import Arrivals
from loadtest.load.lengths import Length
from loadtest.load.slo import conflicts
from loadtest.load.workload import GENERATING, Kind, Sessions

if TYPE_CHECKING:
    from loadtest.load.scenario import Scenario


MOST_SHARED = 50_000_000  # tokens, 200 MB
RECORDED = Sessions(think=1.0)  # what a session of a trace has, whatever its pauses


def faults(scenario: Scenario) -> Iterator[Fault]:
    """Every fault, in the order of the fields."""
    yield from _arrivals(scenario)
    yield from _mix(scenario)
    yield from _trace(scenario)
    if scenario.warmup + scenario.cooldown >= scenario.seconds:
        field = "warmup" if scenario.warmup >= scenario.cooldown else "cooldown"
        found = f"{scenario.warmup + scenario.cooldown:g} s of warm-up and cool-down"
        yield Fault((field,), found, f"less than the duration, {scenario.seconds:g} s")
    classes = dict.fromkeys(kind.class_name for kind in scenario.workload.mix)
    for index, objective in enumerate(scenario.slo):
        name = objective.class_name
        if name and name not in classes:
            expected = f"a class of the mix: {', '.join(classes)}"
            yield Fault(("slo", index), f"the class {name}", expected, nearest(name, classes))
    for index, expected in conflicts(scenario.slo):
        yield Fault(("slo", index), str(scenario.slo[index]), expected)
    for name, tenant in scenario.workload.tenants.items():
        if tenant.key_env is not None and tenant.key_file is not None:
            at = ("workload", "tenants", name, "key_file")
            yield Fault(at, "a second place for the key", "either key_env or key_file")


def _arrivals(scenario: Scenario) -> Iterator[Fault]:
    given, at = scenario.arrivals, ("arrivals",)
    if isinstance(given, str):
        return
    yield from _one_of(given, at, tuple(Arrivals.__struct_fields__))
    above = "a rate above 0"
    for name, rate in (("poisson", given.poisson), ("constant", given.constant)):
        if rate is not None and not rate.amount:
            yield Fault((*at, name), str(rate), above)
    if given.gamma is not None and not given.gamma.rate.amount:
        yield Fault((*at, "gamma", "rate"), str(given.gamma.rate), above)
    if given.ramp is not None and not (given.ramp.start.amount or given.ramp.end.amount):
        yield Fault((*at, "ramp", "to"), str(given.ramp.end), above)
    if given.steps is not None and not any(step.rate.amount for step in given.steps):
        yield Fault((*at, "steps"), "no step with a rate above 0", "at least one")


def _mix(scenario: Scenario) -> Iterator[Fault]:
    mix, at = scenario.workload.mix, ("workload", "mix")
    if not mix:
        yield Fault(at, "no kind of request", "at least one")
    for index, kind in enumerate(mix):
        yield from _kind(kind, (*at, index))


def _kind(kind: Kind, at: Path) -> Iterator[Fault]:
    lengths = {"prompt": kind.prompt, "output": kind.output, "inputs": kind.inputs, "query": kind.query}
    for name, length in lengths.items():
        if isinstance(length, Length):
            yield from _length(length, (*at, name))
    if kind.session is not None:
        yield from _length(kind.session.turns, (*at, "session", "turns"))
        if kind.session.first is not None:
            yield from _length(kind.session.first, (*at, "session", "first"))
        agents = kind.session.subagents
        if agents is not None:
            yield from _length(agents.count, (*at, "session", "subagents", "count"))
            yield from _length(agents.turns, (*at, "session", "subagents", "turns"))
        if kind.kind != "chat":
            yield Fault((*at, "session"), f"a conversation of {kind.kind}", "kind: chat")
        own = msgspec.structs.replace(kind.session, think=1.0, spread=None) != RECORDED or kind.prefix is not None
        if kind.prompt == "trace" and own:
            found = "a prefix, or turns, beside those of a trace"
            yield Fault((*at, "session"), found, "no more than think and spread")
        if kind.output == "trace" and kind.prompt != "trace":
            yield Fault((*at, "output"), "a trace's lengths in a conversation of its own", "prompt: trace, too")
    if kind.prefix is not None and kind.kind not in GENERATING:
        yield Fault((*at, "prefix"), f"a shared prefix of {kind.kind}", "kind: chat or completions")
    if kind.prefix is not None and kind.prefix.tokens * kind.prefix.count > MOST_SHARED:
        found = f"{kind.prefix.tokens * kind.prefix.count} tokens in all prefixes"
        yield Fault((*at, "prefix"), found, f"at most {MOST_SHARED}: they are held in memory")


def _length(length: Length, at: Path) -> Iterator[Fault]:
    yield from _one_of(length, at, ("constant", "uniform", "log_normal", "geometric", "empirical"))
    if length.empirical == ():
        yield Fault((*at, "empirical"), "an empty list", "lengths to draw from")
    if length.uniform is not None and length.uniform.least > length.uniform.most:
        found = f"{length.uniform.least} to {length.uniform.most}"
        yield Fault((*at, "uniform"), found, "from at most to")
    if length.least > length.most:
        yield Fault((*at, "least"), str(length.least), f"at most {length.most}, which is most")


def _one_of(struct: msgspec.Struct, at: Path, names: tuple[str, ...]) -> Iterator[Fault]:
    given = [name for name in names if getattr(struct, name) is not None]
    if len(given) != 1:
        yield Fault(at, " and ".join(given) or "none", f"one of {', '.join(names)}")


def _trace(scenario: Scenario) -> Iterator[Fault]:
    users: list[Path] = [("arrivals",)] if scenario.arrivals == "trace" else []
    for index, kind in enumerate(scenario.workload.mix):
        for name, length in (("prompt", kind.prompt), ("output", kind.output)):
            if length == "trace":
                users.append(("workload", "mix", index, name))
    if scenario.trace is None:
        for user in users:
            yield Fault(user, "trace", "a trace beside it: trace: {file: ...}")
    elif not users:
        yield Fault(("trace",), "a trace that nothing uses", "arrivals: trace, or a prompt or output of trace")
