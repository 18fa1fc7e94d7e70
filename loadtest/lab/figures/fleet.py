"""Rows about engines: prefix hits, an engine that fails; and the speed of the simulation."""

from __future__ import annotations

from loadtest.clients.retries import Clients
from loadtest.lab.figures.runs import MIX, Setting, hits, measured
from loadtest.lab.rows import Row, percent
from loadtest.load.plan import poisson
from loadtest.load.scenario import find, load
from loadtest.report.stats import quantile
from loadtest.simulate.run_records import Fault
from loadtest.simulate.simulated_client import Try

SESSIONS = 1.25  # that begin per second and engine: their prompts about fill the engines' caches
LIGHT = 0.5  # of the capacity: three engines of four can carry it
AFTER = 90.0  # seconds a run with a fault goes on, so that what hangs can time out


def prefix_hits(setting: Setting, what: str, *, gateway: bool, big: bool) -> float:
    """Cached over prompt tokens, of every answer but those at the start."""
    calls = poisson(load(find("multi-turn")).workload.mix, SESSIONS * setting.engines, setting.ends, setting.seed)
    outcome = setting.run(f"conversations, {what}", calls, gateway=gateway, big=big)
    done = [t for t in measured(setting, outcome) if t.outcome == "ok"]
    return hits(done)


def row10(setting: Setting) -> list[Row]:
    ours = prefix_hits(setting, "gateway", gateway=True, big=False)
    one = prefix_hits(setting, "one big engine", gateway=False, big=True)
    spread = prefix_hits(setting, "round robin", gateway=False, big=False)
    return [
        Row(
            name="10",
            what=f"prefix hits of conversations, over those of one engine {setting.engines} times as big",
            value=f"{ours / one:.3f} ({percent(ours)})",
            baseline=f"big {percent(one)}, round robin {percent(spread)}",
            milestone=">= 0.85",
            met=ours / one >= 0.85,
        )
    ]


def row13(setting: Setting) -> list[Row]:
    """Fail one engine of several at half load."""
    rows = []
    for what, name, bound in (("die", "killed", 1.0), ("stop", "stopped", 5.0)):
        fault = Fault(at=setting.warm, what=what, engines=(0,))  # type: ignore[arg-type] # one of its words
        ends = setting.warm + AFTER
        calls = poisson(MIX, LIGHT * setting.saturated().calls, ends, setting.seed)
        never = Clients(retries=0, patience={name: target.deadline for name, target in setting.targets.items()})
        outcome = setting.run(f"one engine is {name}", calls, faults=(fault,), clients=never, ends=ends, grace=AFTER)
        after = max(0.0, outcome.result.last_posts[0] - setting.warm)
        failed = [t for t in outcome.result.tries if t.finished >= setting.warm and _unanswered(t)]
        slow = [t.first_byte - t.sent for t in outcome.result.tries if t.sent >= setting.warm - 5 and t.status == 200]
        rows.append(
            Row(
                name="13",
                what=f"one engine is {name} at half load: until its last call; errors before a first byte",
                value=f"{after:.2f} s; {len(failed)}",
                baseline=f"ttft of all p99 {quantile(slow, 0.99):.2f} s, longest {max(slow, default=0.0):.2f} s",
                milestone=f"<= {bound:g} s; 0",
                met=after <= bound and not failed,
            )
        )
    return rows


def _unanswered(tried: Try) -> bool:
    return tried.outcome != "ok" and tried.status != 200


def row16(setting: Setting) -> list[Row]:
    """Calls of the gateway simulated per minute of CPU, engines, clients and all: what an undisturbed core takes.

    That is the best of three runs of the same (as `timeit` says of its own): a neighbour on the core makes it slower,
    nothing makes it faster.
    """
    outcomes = [setting.overload(2.0, name=name) for name in ("", ", again", ", and again")]
    least, _, speed = sorted(outcome.sent / outcome.cpu * 60.0 for outcome in outcomes)
    return [
        Row(
            name="16",
            what="simulated calls per minute of one core, at 2x",
            value=f"{speed:,.0f} (worst of three {least:,.0f})",
            milestone=">= 200,000",
            met=speed >= 200_000,
        )
    ]
