"""Goodput and lateness of a run, and the rows about Retry-After.

A try counts as *in time* if it was answered well
within its class's two targets (first token, last token), counted from the sending of that try: a client that was
refused and came back when it was told to has begun again. Goodput is what tries in time add up to, in tokens of prompt
and output per second of the measured part of the run, over the capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from loadtest.clients.calls import Try
from loadtest.clients.retries import Clients
from loadtest.lab.figures.runs import Setting, in_time, measured, tokens
from loadtest.lab.rows import Row, percent
from loadtest.load.plan import poisson
from loadtest.report.stats import quantile


def goodput(setting: Setting, tries: Iterable[Try], *, first: bool = False) -> float:
    """Tokens of tries in time, per second, over the capacity. `first`: only of calls answered at their first try."""
    good = [t for t in measured(setting, tries) if in_time(t, setting.targets) and not (first and t.number > 1)]
    return sum(map(tokens, good)) / setting.measured / setting.saturated().tokens


def late(setting: Setting, tries: Iterable[Try]) -> float:
    """Return the share of the tries given to an engine that was not in time."""
    admitted = [t for t in measured(setting, tries) if t.upstream > 0 and t.outcome != "left"]
    return sum(not in_time(t, setting.targets) for t in admitted) / max(1, len(admitted))


def retry_after(setting: Setting) -> list[Row]:
    """The second tries of clients that come back once, exactly when they were told to; the share that is admitted."""
    patience = {name: target.deadline for name, target in setting.targets.items()}
    clients = Clients(retries=1, exact=True, patience=patience)
    tries = measured(setting, setting.overload(2.0, clients=clients, name=", Retry-After obeyed once"))
    what = "clients that obey Retry-After at 2x: admitted when they come back"
    return [_returned(what, tries, lambda tried: tried.upstream > 0), *limits(setting)]


def _returned(what: str, tries: Iterable[Try], admits: Callable[[Try], bool], more: str = "") -> Row:
    """The second of these tries: how many are admitted, and how long their clients were told to wait."""
    back = [tried for tried in tries if tried.number == 2]
    waits = [tried.sent - tried.intended for tried in back]
    return Row(
        name="retry-after",
        what=what,
        value=f"{percent(sum(map(admits, back)) / max(1, len(back)))} of {len(back)}",
        baseline=f"told to wait {quantile(waits, 0.5):.1f} s (p50), {quantile(waits, 0.95):.1f} s (p95){more}",
    )


LIMITED = (  # what is limited, how, and calls a second
    ("requests at 10/s, 15/s offered", "requests: 10/s", 15.0),
    ("requests at 10/s, 40/s offered", "requests: 10/s", 40.0),
    ("tokens at half of what is offered", "tokens: 5k/s", 15.0),
)


def limits(setting: Setting) -> list[Row]:
    """The second tries of clients that rate limits refuse: whoever comes back when told is let in."""
    rows = []
    for what, limit, rate in LIMITED:
        policy = b"tenants: {anonymous: {}}\nlimits: {per_tenant: {%b}}\n" % limit.encode()
        limited = Setting(
            engines=setting.engines, seed=setting.seed, policy=policy, warm=setting.warm, measured=setting.measured,
            progress=setting.progress,
        )  # fmt: skip
        calls = poisson(limited.mix, rate, limited.ends, limited.seed)
        offered = limited.run(f"limits, {what}", calls, clients=Clients(retries=1, exact=True))
        setting.left += limited.left
        tries = measured(limited, offered)
        served = sum(map(_unlimited, tries)) / setting.measured
        said = f"{what}: admitted when they come back"
        rows.append(_returned(said, tries, _unlimited, f"; {served:.1f} calls a second"))
    return rows


def _unlimited(tried: Try) -> bool:
    return tried.recorded != "rate_limited"
