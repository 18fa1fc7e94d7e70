"""What `gateway simulate --help` says, and what it answers in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from loadtest.report.capacity import RULE
from loadtest.report.number_format import count, printable
from loadtest.report.report import check
from loadtest.simulate.jobs import Done

DESCRIPTION = """\
What would this policy have done to last week's traffic? The gateway itself, its whole pipeline and every decision,
over simulated engines and in virtual time: hours of traffic in minutes, without a socket or a GPU.

The same seed gives the same figures to the last digit, so that what differs between two policies is the policies."""

EXAMPLES = """\
examples:
  gateway simulate --policy next.yaml --trace last-week.csv --engines 8      last week's traffic under another policy
  gateway simulate --policy now.yaml --policy next.yaml --trace last-week.csv --engines 8 --out report
  gateway simulate --scenario overload --engines 1 --compare round_robin     what the gateway is worth at twice the load
  gateway simulate --scenario chat --rate 100/s --engines 2,4,8,16 --slo 'ttft.p99<2s'    how many engines do I need?
  gateway simulate --scenario chat --engines 4,8 --slo 'ttft.p99<2s' --find-capacity      how much can they take?
  gateway simulate --trace azure.csv --speed 10 --engines 4,8 --compare direct,round_robin --seed 7

Last week's traffic: a CSV with TIMESTAMP, ContextTokens, GeneratedTokens for each request (as Azure publishes its
traces), BurstGPT's CSV, or Mooncake's JSONL, whose hash_ids say which prompts begin alike. A scenario file can give a
trace classes and tenants of its own (arrivals: trace). Tenants of a scenario that the policy has too are told apart;
all others call without a key, as the tenant anonymous.

Policies and numbers of engines are compared in one table and one page, each simulated in a process of its own. The
simulated clients try again as OpenAI's does (--retries) and give up after --timeout. Engines are profiles of real ones
(--profile); how near these come to yours is what `bench` of both will show.

Ctrl-C ends it and reports what there is, marked partial.
Exit status: 0; 1: no number of engines kept the SLO under one of the policies; 2: a mistake; 130: Ctrl-C."""

GROUPS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "what is simulated": (
        ("policy", "FILE", "the gateway's policy; repeatable; left out: the defaults"),
        ("engines", "N[,N...]", "how many engines, 1 to 1024; several numbers are compared (default: 4)"),
        ("profile", "NAME|FILE", "what an engine is (default: h100-8b), or a file of `gateway calibrate`"),
        ("max-model-len", "N", "tokens of a prompt and its answer together, at most (default: the profile's)"),
        ("compare", "NAMES", "the same engines without the gateway too: round_robin, direct"),
        ("jobs", "N", "simulations at the same time (default: a core each)"),
    ),
    "what is expected": (
        ("slo", "SLO", "e.g. 'interactive.ttft.p99<2s, goodput>=95%%', instead of the scenario's"),
        ("find-capacity", "", "search the highest rate that keeps the SLO: " + RULE.replace("%", "%%")),
    ),
    "report": (
        ("out", "FOLDER", "write report.html, report.json and requests.csv there"),
        ("requests", "", "every request in them too, which takes memory: 1 GB a million"),
        ("force", "", "write over reports in it"),
    ),
}  # fmt: skip


def kept(done: Done) -> bool:
    """Whether the SLO was kept: at its own rate, or at any rate of a search."""
    if done.capacity is not None:
        return done.capacity.kept > 0.0
    return all(not check(one.run.slos, one.run) for one in done.made)


def answers(done: Sequence[Done], *, traced: bool) -> Iterator[str]:
    """How many engines are needed, or what they can take: a line or two for each policy, baselines too. `traced`: rates
    of a search are times the speed that the trace was given."""
    groups: dict[str, list[Done]] = {}
    for one in done:
        groups.setdefault(one.cell.name.partition(", ")[0], []).append(one)
    for name, group in groups.items():
        group.sort(key=lambda one: one.cell.engines)
        if group[0].capacity is not None:
            yield from _capacities(printable(name), group, traced=traced)
        elif group[0].made and group[0].made[0].run.slos:
            yield _enough(printable(name), group)


def _enough(name: str, group: Sequence[Done]) -> str:
    """Which of the numbers of engines keep the SLO."""
    offered = count(group[0].made[0].run.rate)
    good = [one.cell.engines for one in group if kept(one)]
    missed = [one for one in group if one.cell.engines not in good]
    if not good:
        most = group[-1]
        if len(group) == 1:
            do = "does" if most.cell.engines == 1 else "do"
            return f"{name}: {_engines(most.cell.engines)} {do} not keep the SLO at {offered}/s: {_why(most)}"
        return f"{name}: none of these numbers of engines keeps the SLO at {offered}/s; {_closest(most)}"
    said = f"{name}: {_engines(min(good))} {'is' if min(good) == 1 else 'are'} enough for the SLO at {offered}/s"
    below = [one for one in missed if one.cell.engines < min(good)]
    if below:
        said += f"; {_closest(below[-1])}"
    odd = [str(one.cell.engines) for one in missed if one.cell.engines > min(good)]
    return said + (f"; and yet it was missed with {', '.join(odd)}" if odd else "")


def _closest(one: Done) -> str:
    return f"with {one.cell.engines}: {_why(one)}"


def _why(one: Done) -> str:
    run = one.made[0].run
    missed = check(run.slos, run)
    first = missed[0]
    return f"{first.class_name}: {first.message}" if first.class_name else first.message


def _capacities(name: str, group: Sequence[Done], *, traced: bool) -> Iterator[str]:
    for one in group:
        capacity = one.capacity
        assert capacity is not None  # noqa: S101 # of a search
        unit = " times the speed given" if traced else "/s"
        said = str(capacity).replace("/s", unit)
        each = "" if traced or not capacity.kept else f" ({count(capacity.kept / one.cell.engines)}/s an engine)"
        yield f"{name}, {_engines(one.cell.engines)}: {said}{each}"
    best = max(group, key=lambda one: one.cell.engines)
    wanted = 1.0 if traced else best.cell.scenario.rate
    if best.capacity is not None and best.capacity.kept and wanted:
        needed = math.ceil(wanted * best.cell.engines / best.capacity.kept)
        what = "the trace at the speed given" if traced else f"{count(wanted)}/s"
        yield f"{name}: {what} needs {_engines(needed)}, where each takes as much as one of {best.cell.engines} does"


def speed(done: Sequence[Done], wall: float) -> str:
    """How fast it was simulated, and in how much memory."""
    made = [simulated for one in done for simulated in one.made]
    calls, cpu = sum(one.calls for one in made), sum(one.cpu for one in made)
    seconds = sum(one.seconds for one in made)
    whole = f"{count(calls)} calls, {_long(seconds)} of virtual time, in {_long(wall)}"
    a_minute = [count(60.0 * calls / max(1e-9, time)) for time in (wall, cpu)]
    most = max((one.memory for one in made), default=0)
    return f"{whole}: {a_minute[0]} calls a minute, {a_minute[1]} a core, with at most {most / 1e6:.0f} MB"


def _long(seconds: float) -> str:
    for size, unit in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2.0 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _engines(number: int) -> str:
    return f"{number} engine" if number == 1 else f"{number} engines"
