"""Comparison on one real vLLM on CPU at twice its capacity: direct, behind vllm-router, behind Weir. `--help` tells.

Exit status 0: Weir reaches its targets; 1: it misses one, or a server under test failed; 2: bad arguments, or there is
no vLLM to start here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.lab.vllm import comparison_load
from loadtest.lab.vllm.comparison_load import (
    BATCH,
    INTERACTIVE,
    KINDS,
    CallKind,
    ScheduledCall,
    Side,
    closed_loop,
    open_loop,
    plan,
    save,
    side,
)
from loadtest.lab.vllm.comparison_sides import ENGINE, POLICY, SIDES, access, router, settle
from loadtest.lab.vllm.comparison_table import ends_of, misses, table_of
from loadtest.lab.vllm.real_vllm import Vllm, absent
from loadtest.processes import ChildError, free_port

WIDTH = 160  # of a table that nobody looks at in a terminal
WARM_UP = 3.0  # seconds
CAPACITY = 15.0
ALONE = 6.0
CHANGED = 0.2  # share by which the capacity may differ between the beginning and the end
IN_FLIGHT = 2  # calls for each place in the engine, to fill it


def _sizes(kind: CallKind) -> str:
    return f"{kind.words} words in, {kind.output} tokens out"


HELP = f"""\
Starts one real vLLM on this machine's CPU, with so few places (--max-num-seqs 8) that it is easily overloaded, measures
how many calls a second it can answer, then sends it twice as many: first straight, then through vllm-router, then
through Weir. The same calls at the same times each time, one half of each kind:

  interactive   {_sizes(INTERACTIVE)}, in time if the first is here within {INTERACTIVE.within:.0f} s
  batch         {_sizes(BATCH)}, in time if the last is here within {BATCH.within:.0f} s

Times count from when a call was to be sent; a call that is refused is not in time. Targets: at least 97 % of Weir's
interactive calls in time, and tokens of calls in time (read and written, a second) not below direct access.

  python -m loadtest.lab.vllm.comparison                        all three, six minutes
  python -m loadtest.lab.vllm.comparison --sides direct,weir    without the router
  python -m loadtest.lab.vllm.comparison --rounds 3             taking turns three times, on a noisy machine
  python -m loadtest.lab.vllm.comparison --policy mine.yaml     what another policy does; an engine {ENGINE} in it
                                                         stands for the one that is started here
  python -m loadtest.lab.vllm.comparison --keep /tmp/run        leave every call, the logs and the policy there

Needs: `make vllm` once; vllm-router on the PATH or named by $VLLM_ROUTER, else it is left out. Everything runs on the
same cores, sender included: an otherwise idle machine, and a sender's lag of some milliseconds in the table's last
column, make it a measurement.
"""


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line. Exits with status 2 where it cannot be understood."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.lab.vllm.comparison",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of load on each side (default: 60)")
    parser.add_argument("--rounds", type=int, default=1, help="how often each side is measured (default: 1)")
    parser.add_argument("--load", type=float, default=2.0, help="times the engine's capacity (default: 2)")
    parser.add_argument("--sides", default=",".join(SIDES), help="which, in this order (default: %(default)s)")
    parser.add_argument("--policy", type=Path, default=POLICY, help="Weir's (default: policies/one-engine.yaml)")
    parser.add_argument("--max-num-seqs", type=int, default=8, help="places in the engine (default: 8)")
    parser.add_argument("--seed", type=int, default=1, help="of the load (default: 1)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave logs there")
    given = parser.parse_args(argv)
    given.sides = [name.strip() for name in given.sides.split(",") if name.strip()]
    unknown = [name for name in given.sides if name not in SIDES]
    if unknown or not given.sides:
        parser.error(f"--sides: there is no side {', '.join(unknown)}; one or more of {', '.join(SIDES)}")
    if given.seconds <= 0 or given.load <= 0 or given.rounds < 1 or given.max_num_seqs < 1:
        parser.error("--seconds and --load must be above 0, --rounds and --max-num-seqs at least 1")
    if not given.policy.is_file():
        parser.error(f"--policy: {given.policy} is no file")
    return given


@contextlib.contextmanager
def ahead() -> Iterator[None]:
    """The sender goes before the servers where it may, since they share its cores and it must keep its times."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, before)


class Comparison:
    """Run everything once. `folder` takes the logs; `bars` shows how far it is."""

    def __init__(self, given: argparse.Namespace, folder: Path, console: Console, bars: Progress) -> None:
        self._given = given
        self._folder = folder
        self._console = console
        self._bars = bars

    def run(self) -> list[Side]:
        """Every side of every round. Raises ChildError where a server does not start, or dies."""
        given = self._given
        flags = ("--max-num-seqs", str(given.max_num_seqs), "--uvicorn-log-level", "warning")
        starting = self._bars.add_task("starting vLLM", total=None)
        with Vllm(self._folder / "vllm.log", free_port(), *flags) as vllm:
            self._bars.remove_task(starting)
            before = self._capacity(vllm)
            rate = given.load * before
            sides: list[Side] = []
            for number in range(given.rounds):
                planned = plan(rate, given.seconds, given.seed + number)
                for name in given.sides:
                    sides.append(self._measure(name, vllm, planned, number + 1))
            settle(vllm)
            with ahead(), self._bar("capacity for the mix, once more") as show:
                places = IN_FLIGHT * given.max_num_seqs
                after = uvloop.run(closed_loop(vllm.url, KINDS, places, CAPACITY, given.seed + 3, show))
        changed = abs(after / before - 1.0) > CHANGED
        self._console.print(
            f"Afterwards it answered {after:.1f} calls/s of the mix."
            + (" The machine has other work: the load was not what it should be." if changed else "")
        )
        return sides

    def _measure(self, name: str, vllm: Vllm, planned: list[ScheduledCall], number: int) -> Side:
        settle(vllm)
        seconds, what = self._given.seconds, f"{name}, round {number} of {self._given.rounds}"
        with access(name, vllm, self._given.policy, self._folder) as url, ahead(), self._bar(what) as show:
            found = uvloop.run(open_loop(url, planned, seconds, show))
        save(self._folder / f"{name}-{number}.jsonl", planned, found)
        return side(name, planned, found, seconds)

    def _capacity(self, vllm: Vllm) -> float:
        """Calls of the mix per second, the engine's places always full; says so, and what interactive calls need."""
        given, places = self._given, IN_FLIGHT * self._given.max_num_seqs
        with ahead():
            with self._bar("warming up") as show:
                uvloop.run(closed_loop(vllm.url, KINDS, places, WARM_UP, given.seed, show))
            with self._bar("capacity for the mix") as show:
                mixed = uvloop.run(closed_loop(vllm.url, KINDS, places, CAPACITY, given.seed + 1, show))
            with self._bar("capacity for interactive calls alone") as show:
                alone = uvloop.run(closed_loop(vllm.url, (INTERACTIVE,), places, ALONE, given.seed + 2, show))
        if not mixed or not alone:
            raise vllm.child.failure("answers no calls")
        rate = given.load * mixed
        self._console.print(
            f"The engine answers {mixed:.1f} calls/s of the mix, or {alone:.1f} interactive calls/s alone. "
            f"The load is {rate:.1f} calls/s: its interactive half needs {rate / 2 / alone:.0%} of the engine, "
            "so all of it could be in time."
            if rate / 2 < alone
            else f"The load of {rate:.1f} calls/s is more than the engine could do without any batch calls: "
            f"it answers {alone:.1f} interactive calls/s alone.",
            soft_wrap=True,
        )
        return mixed

    @contextlib.contextmanager
    def _bar(self, what: str) -> Iterator[Callable[[float], None]]:
        task = self._bars.add_task(what, total=1.0)
        if not self._console.is_terminal:
            self._console.print(f"{what} ...", highlight=False)
        try:
            yield lambda share: self._bars.update(task, completed=share)
        finally:
            self._bars.remove_task(task)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; the exit status."""
    given = arguments(argv)
    reason = absent()
    if reason:
        print(f"loadtest.lab.vllm.comparison: {reason}", file=sys.stderr)
        return 2
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    if "vllm-router" in given.sides and router() is None:
        given.sides.remove("vllm-router")
        console.print("vllm-router is left out: it is not on the PATH, nor named by $VLLM_ROUTER")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # else the servers would be left behind
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # one connection per call that waits
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with contextlib.ExitStack() as stack:
        folder = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-")))
        folder.mkdir(parents=True, exist_ok=True)
        bars = stack.enter_context(Progress(*columns, console=console, transient=True))
        try:
            sides = Comparison(given, folder, console, bars).run()
        except ChildError as error:
            print(f"loadtest.lab.vllm.comparison: {error}", file=sys.stderr)
            return 1
    totals = comparison_load.together(sides)
    console.print(table_of(totals))
    for line in ends_of(totals):
        console.print(line, highlight=False)
    missed = misses(totals)
    for line in missed:
        console.print(f"[red]missed:[/] {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
