"""Rows in the field: the interactive class, the KV watermark, an engine that fails, Retry-After.

One function per row: it makes its runs and says what was found. A try counts as *in time* if it was answered well
within its class's two targets (first token, last token), counted from the sending of that try: a client that was
refused and came back when it was told to has begun again. Goodput is what tries in time add up to, in tokens of prompt
and output per second of the measured part of the run, over the capacity.
"""

from __future__ import annotations

from loadtest.clients.retries import Clients
from loadtest.lab.figures.runs import BLOCKS, MIX, Measured, Setting, in_time, measured, tokens
from loadtest.lab.rows import Row, percent
from loadtest.load.plan import poisson
from loadtest.report.stats import quantile
from loadtest.simulate.run_records import Fault
from loadtest.simulate.simulated_client import Try

LIGHT = 0.5  # of the capacity: three engines of four can carry it
AFTER = 90.0  # seconds a run with a fault goes on, so that what hangs can time out


def goodput(setting: Setting, outcome: Measured, *, first: bool = False) -> float:
    """Tokens of tries in time, per second, over the capacity. `first`: only of calls answered at their first try."""
    good = [t for t in measured(setting, outcome) if in_time(t, setting.targets) and not (first and t.number > 1)]
    return sum(map(tokens, good)) / setting.measured / setting.saturated().tokens


def late(setting: Setting, outcome: Measured) -> float:
    """Return the share of the tries given to an engine that was not in time."""
    admitted = [t for t in measured(setting, outcome) if t.upstream > 0 and t.outcome != "left"]
    return sum(not in_time(t, setting.targets) for t in admitted) / max(1, len(admitted))


def row7(setting: Setting) -> list[Row]:
    def seen(outcome: Measured) -> tuple[float, float, float]:
        firsts = [t for t in measured(setting, outcome) if t.class_name == "interactive" and t.number == 1]
        answered = sum(t.outcome == "ok" for t in firsts) / max(1, len(firsts))
        prompt = sum(in_time(t, setting.targets) for t in firsts) / max(1, len(firsts))
        return answered, prompt, quantile([t.queue for t in firsts if t.queue >= 0.0 and t.upstream], 0.99)

    target = setting.targets["interactive"].ttft
    share, prompt, wait = seen(setting.crowded())
    plain = seen(setting.crowded(gateway=False))
    return [
        Row(
            name="7",
            what="interactive at half capacity under 10x: first tries answered",
            value=f"{percent(share)} (in time {percent(prompt)})",
            baseline=f"round robin {percent(plain[0])} (in time {percent(plain[1])})",
            milestone=">= 99 %",
            met=share >= 0.99,
        ),
        Row(
            name="7",
            what=f"the same: p99 queue wait, ttft target {target:g} s",
            value=f"{wait:.3f} s",
            milestone=f"<= {target / 2:g} s",
            met=wait <= target / 2,
        ),
    ]


def row9(setting: Setting) -> list[Row]:
    """On engines whose memory binds first: half the blocks, so that compute alone would take more calls than fit."""
    rows = []
    for blocks in (BLOCKS // 2, BLOCKS):
        what = f"2x load, {blocks} blocks"
        calls = poisson(MIX, 2.0 * setting.saturated().calls, setting.ends, setting.seed)
        result = (setting.overload(2.0) if blocks == BLOCKS else setting.run(what, calls, blocks=blocks)).result
        kv = [share for sample in result.samples if sample.at >= setting.warm for share in sample.kv]
        mean, bound = sum(kv) / len(kv), blocks < BLOCKS
        rows.append(
            Row(
                name="9",
                what=f"KV in use at 2x, {blocks} blocks: mean (p1..p99); preemptions",
                value=f"{mean:.3f} ({quantile(kv, 0.01):.2f}..{quantile(kv, 0.99):.2f}); {result.preempted}",
                baseline="" if bound else "compute may bind before memory here",
                milestone="0.70..0.90" if bound else "",
                met=0.70 <= mean <= 0.90 if bound else None,
            )
        )
    return rows


def retry_after(setting: Setting) -> list[Row]:
    """The second tries of clients that come back once, exactly when they were told to; the share that is admitted."""
    patience = {name: target.deadline for name, target in setting.targets.items()}
    clients = Clients(retries=1, exact=True, patience=patience)
    outcome = setting.overload(2.0, clients=clients, name=", Retry-After obeyed once")
    back = [t for t in measured(setting, outcome) if t.number == 2]
    admitted = sum(t.upstream > 0 for t in back) / max(1, len(back))
    waits = [t.sent - t.intended for t in back]
    return [
        Row(
            name="retry-after",
            what="clients that obey Retry-After at 2x: admitted when they come back",
            value=f"{percent(admitted)} of {len(back)}",
            baseline=f"told to wait {quantile(waits, 0.5):.1f} s (p50), {quantile(waits, 0.95):.1f} s (p95)",
        ),
        *limits(setting),
    ]


LIMITED = (  # what is limited, how, and calls a second
    ("requests at 10/s, 15/s offered", "requests: 10/s", 15.0),
    ("requests at 10/s, 40/s offered", "requests: 10/s", 40.0),
    ("tokens at half of what is offered", "tokens: 5k/s", 15.0),
)


def limits(setting: Setting) -> list[Row]:
    """The same where rate limits refuse them: whoever comes back when told is let in."""
    rows = []
    for what, limit, rate in LIMITED:
        policy = b"tenants: {anonymous: {}}\nlimits: {per_tenant: {%b}}\n" % limit.encode()
        limited = Setting(
            engines=setting.engines, seed=setting.seed, policy=policy, warm=setting.warm, measured=setting.measured,
            progress=setting.progress, known={},
        )  # fmt: skip
        calls = poisson(limited.mix, rate, limited.ends, limited.seed)
        outcome = limited.run(f"limits, {what}", calls, clients=Clients(retries=1, exact=True))
        setting.tries += limited.tries
        tries = measured(limited, outcome)
        back = [t for t in tries if t.number == 2]
        waits = [t.sent - t.intended for t in back]
        admitted = sum(t.recorded != "rate_limited" for t in back)
        rows.append(
            Row(
                name="retry-after",
                what=f"{what}: admitted when they come back",
                value=f"{percent(admitted / max(1, len(back)))} of {len(back)}",
                baseline=f"told to wait {quantile(waits, 0.5):.1f} s (p50), {quantile(waits, 0.95):.1f} s (p95); "
                f"{sum(t.recorded != 'rate_limited' for t in tries) / setting.measured:.1f} calls a second",
            )
        )
    return rows


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
