"""Failover of a gateway's processes and machines under twice their load: `python -m loadtest.lab.failover --help`.

A real gateway of several processes, on sockets, over simulated engines. Clients are OpenAI's, with its default retries,
and raw ones that try once: twice as many calls are open as the engines may have. Each fault happens twice on a site of
its own. First under that load: calls that failed are counted, by client, and the longest time in which no answer began.
Then with long streams alone: the ledger must come back to exactly those that still run.

A relay takes the connections of its own clients with it: their streams that had begun, and their calls that are tried
once, are counted by themselves. Clients of a cluster are those of the machine that does not lead.

Exit status 0: no call failed but by its own relay's death, and no hold was left; 1: not so, with --gate also where a
time is over its target; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import cycle, islice, pairwise
from pathlib import Path

import msgspec
from rich.table import Table

from loadtest.lab.failover.clients import CallEnd, ClosedLoop, Kind, RawCall
from loadtest.lab.failover.faults import FAULTS, QUICK, FailoverFault
from loadtest.lab.failover.site import ENGINES, ROUNDS, SLOTS, FailoverSite
from loadtest.lab.operate.debian import VALKEY, NoProgram
from loadtest.lab.rows import terminal
from loadtest.processes import ChildError, until

RELAYS = 2
LINES = ENGINES * SLOTS  # of each of the two kinds of client: together twice what the engines may have
STREAMS, STREAM_TOKENS = LINES - 2, 6000  # streams that hold memory, alone: none waits, none ends by itself
SETTLES = 10.0  # seconds for what is waited for: then the table says that it did not come
BEGUN = 20.0  # seconds for all streams to begin


class FaultFigures(msgspec.Struct, kw_only=True):
    """Figures of one fault. `before` and `without`: the longest time in seconds in which no answer began, before it and
    from it on. `left`: tokens held once the last client had left, -1: nobody answers. `exact_after`: seconds from the
    fault until the ledger had exactly the streams that ran on; None: it never had."""

    calls: Counter[Kind]
    failed: list[CallEnd]
    own: list[CallEnd]  # failed too, but with their own relay
    before: float
    without: float
    left: int
    exact_after: float | None = None

    @property
    def wrong(self) -> bool:
        """Whether something was lost."""
        return bool(self.failed) or self.left != 0 or self.exact_after is None


def longest(moments: Sequence[float], since: float, to: float) -> float:
    """The longest time between two moments, from the last before `since` until `to`."""
    inside = sorted(moment for moment in moments if since <= moment <= to)
    earlier = max((moment for moment in moments if 0.0 < moment < since), default=since)
    return max(later - sooner for sooner, later in pairwise([earlier, *inside, to]))


async def _under_load(site: FailoverSite, fault: FailoverFault, seconds: float) -> FaultFigures:
    async with ClosedLoop([machine.url for machine in site.followers], LINES) as load:
        await asyncio.sleep(seconds / 2)  # until every line has its turn
        warm = time.monotonic()
        await asyncio.sleep(seconds / 2)
        struck = await asyncio.to_thread(fault.strike, site)
        await asyncio.to_thread(until, struck.mended, SETTLES)
        await asyncio.sleep(seconds)
        to = time.monotonic()
    held = site.leader.held
    await asyncio.to_thread(until, lambda: held() == 0, SETTLES)
    began = [end.began for end in load.ends]
    failed = [end for end in load.ends if end.failure]
    return FaultFigures(
        calls=Counter(end.kind for end in load.ends),
        failed=[end for end in failed if end.port not in struck.own],
        own=[end for end in failed if end.port in struck.own],
        before=longest(began, warm, struck.at),
        without=longest(began, struck.at, to),
        left=held(),
    )


async def _holding(site: FailoverSite, fault: FailoverFault) -> float | None:
    """Seconds from the fault until the ledger has the streams that run on, and no more; None: it does not."""
    urls = islice(cycle([machine.url for machine in site.followers]), STREAMS)
    streams = [RawCall(url, stream=True, tokens=STREAM_TOKENS) for url in urls]

    def running() -> int:
        return sum(stream.open for stream in streams)

    def exact() -> bool:
        return site.leader.in_flight() == running()

    try:
        if (
            await asyncio.to_thread(until, lambda: exact() and all(each.answer.first_event for each in streams), 20.0)
            is None
        ):
            raise ChildError(f"{STREAMS} streams did not begin")
        struck = await asyncio.to_thread(fault.strike, site)
        found = await asyncio.to_thread(until, lambda: struck.mended() and exact(), SETTLES)
        return None if found is None else time.monotonic() - struck.at
    finally:
        for stream in streams:
            await stream.leave()


def measured(fault: FailoverFault, seconds: float, seed: int = 0, rounds: int = ROUNDS) -> FaultFigures:
    """The fault under load, then with streams alone. `rounds`: of signals, drawn by `seed`. Raises ChildError,
    and NoProgram."""
    with tempfile.TemporaryDirectory(prefix="weir-failover-") as folder:
        with _site(folder, "loaded", fault, seed, rounds) as site:
            figures = asyncio.run(_under_load(site, fault, seconds))
        with _site(folder, "holding", fault, seed, rounds) as site:
            figures.exact_after = asyncio.run(_holding(site, fault))
    return figures


def _site(folder: str, name: str, fault: FailoverFault, seed: int, rounds: int) -> FailoverSite:
    path = Path(folder) / name
    path.mkdir()
    return FailoverSite(path, relays=RELAYS, machines=fault.machines, seed=seed, rounds=rounds)


# -- what is printed --------------------------------------------------------------------------------------------------


def _counts(ends: Sequence[CallEnd]) -> str:
    """Calls that failed, by client and kind of failure."""
    by = Counter(f"{end.kind} {end.failure}" for end in ends)
    return ", ".join(f"{count} {what}" for what, count in by.most_common()) or "0"


def _row(table: Table, fault: FailoverFault, figures: FaultFigures) -> bool:
    """Add a row; whether every time is within its target."""
    exact = figures.exact_after
    within = figures.without <= fault.within
    if fault.exact_within is not None and exact is not None:
        within &= exact <= fault.exact_within
    word = "[red]lost[/]" if figures.wrong else "[green]ok[/]" if within else "[yellow]late[/]"
    calls = [str(figures.calls[kind]) for kind in ("openai", "raw")]
    without = f"{figures.without:.2f} ({figures.before:.2f})"
    ends = [_counts(figures.failed), _counts(figures.own), without, f"<= {fault.within:g}"]
    table.add_row(fault.title, *calls, *ends, str(figures.left), _seconds(exact, fault.exact_within), word)
    return within


def _seconds(exact: float | None, aim: float | None) -> str:
    """Seconds beside what is aimed at."""
    return ("never" if exact is None else f"{exact:.2f}") + (f" (<= {aim:g})" if aim is not None else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; the exit status."""
    options = _arguments(argv)
    console = terminal()
    names, missing = options.faults, ""
    try:
        VALKEY.command()
    except NoProgram as error:
        missing = str(error)
        names = [name for name in names if FAULTS[name].machines == 1]
    lost = late = False
    columns = ["fault", "calls: openai", "raw", "failed (target 0)", "with their own relay"]
    columns += ["s without grants (before)", "target", "holds left (0)", "s until holds exact (target)", ""]
    title = f"{ENGINES} engines of {SLOTS} calls, {2 * LINES} calls open, {RELAYS} relays"
    table = Table(*columns, title=title)
    for name in names:
        print(f"{FAULTS[name].title} ...", file=sys.stderr)
        try:
            figures = measured(FAULTS[name], options.seconds, options.seed, options.rounds)
        except ChildError as error:
            console.print(f"[red]{name}[/]: {error}", markup=True, highlight=False)
            lost = True
            continue
        late |= not _row(table, FAULTS[name], figures)
        lost |= figures.wrong
    console.print(table)
    if missing:
        console.print(f"without faults of several machines: {missing}")
    return int(lost or (options.gate and late))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with status 2 where it cannot be understood."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.lab.failover",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", default="", metavar="LIST", help=f"of {', '.join(FAULTS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)}, for a second or two each; a minute")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="of load before and after each fault (default: 4; 2)"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"of signals (default: {ROUNDS})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the signals that are sent (default: 0)")
    parser.add_argument("--gate", action="store_true", help="exit status 1 also where a time is over its target")
    given = parser.parse_args(argv)
    given.faults = [name for name in given.faults.split(",") if name] or list(QUICK if given.quick else FAULTS)
    given.seconds = given.seconds or (2.0 if given.quick else 4.0)
    if not set(given.faults) <= FAULTS.keys():
        parser.error(f"--faults: of {', '.join(FAULTS)}")
    if given.rounds < 1:
        parser.error("--rounds is at least 1")
    if given.seconds <= 0.0:
        parser.error("--seconds is more than 0")
    return given


if __name__ == "__main__":
    sys.exit(main())
