"""Deterministic simulation tests of the whole gateway.

Random calls, faults, reloads and reports of sidecars befall the whole gateway in virtual time; what must hold whatever
happens is looked at whenever nothing is left to be done at a moment (loadtest/lab/dst/invariants.py). One seed is
one run. With --relays the gateway is several relays and a decider: they die, hang, are cut off, and hear old messages
(loadtest/lab/dst/relays/laws.py).

  python -m loadtest.lab.dst --seeds 1000             the seeds 0 to 999, on every core
  python -m loadtest.lab.dst --seeds 1000 --first N   the thousand from N on
  python -m loadtest.lab.dst --seed N                 one run, and everything that happened in it
  python -m loadtest.lab.dst --seed N --only 3,7,9    the same with these events of it alone
  python -m loadtest.lab.dst --relays --seeds 1000    the same of relays and deciders
  python -m loadtest.lab.dst --relays --seeds 100000 --jobs 2 --within 590
                                                      as many of them as 590 s allow, and the command that goes on

A seed that fails is made smaller: events are left out while it still fails in the same way. What is printed of it is
the command that runs what is left.

Exit status 0: everything held; 1: something did not; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache, partial

import msgspec

from gateway.core.policy.policy import Policy
from loadtest.lab.dst.case import Case
from loadtest.lab.dst.draw import case
from loadtest.lab.dst.policy import read_json
from loadtest.lab.dst.relays.draw import relay_case
from loadtest.lab.dst.world import simulate
from loadtest.lab.rows import parser_of
from loadtest.lab.seeds import explore
from loadtest.simulate import vtime

SHOWN = 5  # failed seeds that are made smaller
TRIES = 300  # runs that making one smaller may take


class Failure(msgspec.Struct, frozen=True):
    """A seed that failed, and what was wrong."""

    seed: int
    wrong: str
    relays: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """End of a simulation: what was `wrong` first, empty for nothing, and `log`, all that happened, a line each."""

    wrong: str
    log: list[str]


def attempt(what: Case, read: Callable[[bytes], Policy] = read_json) -> Outcome:
    """Run a case to its end. That it never ends, or waits for nothing, is one of the things that are wrong; so is
    whatever it raises, which else would end all the others and not tell its seed."""
    log: list[str] = []
    try:
        return Outcome(vtime.run(simulate(what, log, read)), log)
    except vtime.Deadlock as error:
        return Outcome(str(error), log)
    except Exception as error:  # whatever a seed raises is what was looked for, and is reported with the seed
        return Outcome(f"the simulation failed: {error!r}", log)


def failures(seeds: Iterable[int], draw: Callable[[int], Case] = case) -> list[Failure]:
    """Return the seeds of these that fail; `draw` makes the case of a seed."""
    read = cache(read_json)  # neighbours with relays share their policies
    outcomes = ((seed, attempt(draw(seed), read).wrong) for seed in seeds)
    return [Failure(seed, wrong, relays=draw is relay_case) for seed, wrong in outcomes if wrong]


relay_failures = partial(failures, draw=relay_case)


def only(whole: Case, numbers: Container[int]) -> Case:
    """Return the same case with these of its events alone."""
    kept = [pair for pair in zip(whole.numbers, whole.events, strict=True) if pair[0] in numbers]
    found, events = tuple([number for number, _ in kept]), tuple([event for _, event in kept])
    return msgspec.structs.replace(whole, numbers=found, events=events)


def kind(wrong: str) -> str:
    """Kind of a failure: its words without times and numbers."""
    return re.sub(r"call [0-9a-f]+|\S*\d\S*", "N", wrong)[:120]


def shrink(whole: Case, wrong: str, run: Callable[[Case], Outcome] = attempt) -> Case:
    """The case with as few events as are found to fail in the same way: halves are left out, then quarters, and so on
    (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002)."""
    wanted, tries = kind(wrong), 0
    kept = list(whole.numbers)
    size = max(1, len(kept) // 2)
    while size and tries < TRIES:
        at, smaller = 0, False
        while at < len(kept) and tries < TRIES:
            fewer = kept[:at] + kept[at + size :]
            tries += 1
            if kind(run(only(whole, set(fewer))).wrong) == wanted:
                kept, smaller = fewer, True
            else:
                at += size
        size = size if smaller and size == 1 else size // 2
    return only(whole, set(kept))


def command(what: Case) -> str:
    """Command that runs a case again."""
    relays = " --relays" if what.relays else ""
    whole = _drawn(what.seed, relays=bool(what.relays))
    part = "" if what.numbers == whole.numbers else f" --only {','.join(map(str, what.numbers)) or 'none'}"
    return f"python -m loadtest.lab.dst{relays} --seed {what.seed}{part}"


def _numbers(text: str) -> set[int]:
    """Read 1,2,7. Raises ValueError."""
    return {int(number) for number in text.split(",") if number != "none"}


def _drawn(seed: int, *, relays: bool) -> Case:
    return relay_case(seed) if relays else case(seed)


def report(failure: Failure) -> str:
    """A failed seed in words: what was wrong, and how to see it."""
    whole = _drawn(failure.seed, relays=failure.relays)
    small = shrink(whole, failure.wrong)
    lines = [f"seed {failure.seed}: {failure.wrong}", f"  all {len(whole.events)} events:  {command(whole)}"]
    if len(small.events) < len(whole.events):
        lines.append(f"  these {len(small.events)} alone:  {command(small)}")
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with status 2 where it cannot be understood."""
    parser = parser_of("dst", __doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many to run (default: 1000)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first of them (default: 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes at a time")
    parser.add_argument("--within", type=float, default=math.inf, metavar="S", help="seconds, then no more are begun")
    parser.add_argument("--seed", type=int, metavar="N", help="run this one alone, and print what happens")
    parser.add_argument("--only", type=_numbers, metavar="LIST", help="of its events these alone, as 3,7,9")
    parser.add_argument("--relays", action="store_true", help="several relays and a decider, in place of one process")
    given = parser.parse_args(argv)
    if given.seeds < 1 or given.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1")
    if given.only is not None and given.seed is None:
        parser.error("--only is for one --seed")
    return given


def replay(seed: int, numbers: set[int] | None, *, relays: bool) -> int:
    """Run one seed and print its schedule. The exit status."""
    what = _drawn(seed, relays=relays)
    outcome = attempt(what if numbers is None else only(what, numbers))
    print("\n".join(outcome.log))
    print(f"seed {seed}: {outcome.wrong or 'everything held'}")
    return 1 if outcome.wrong else 0


def main(argv: Sequence[str] | None = None) -> int:
    given = arguments(argv)
    if given.seed is not None:
        return replay(given.seed, given.only, relays=given.relays)
    began, done, failed = time.monotonic(), 0, []
    look = relay_failures if given.relays else failures
    seeds = range(given.first, given.first + given.seeds)
    for more, found in explore(seeds, given.jobs, look, lambda: time.monotonic() < began + given.within):
        done += more
        failed += found
        for failure in found:  # at once: what makes them smaller may take long
            print(f"\rseed {failure.seed}: {failure.wrong}", file=sys.stderr)
        print(f"\r{done} of {given.seeds} seeds, {len(failed)} failed", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    failed.sort(key=lambda failure: failure.seed)
    for failure in failed[:SHOWN]:
        print(report(failure))
    if len(failed) > SHOWN:
        print(f"and {len(failed) - SHOWN} more: {', '.join(str(failure.seed) for failure in failed[SHOWN:])}")
    took = time.monotonic() - began
    print(f"{done} seeds from {given.first} on in {took:.0f} s ({done / took:.1f} a second): {len(failed)} failed")
    if done < given.seeds:
        print(f"go on: {_resuming(given, done)}")
    return 1 if failed else 0


def _resuming(given: argparse.Namespace, done: int) -> str:
    """Command that runs the seeds that are left."""
    relays = "--relays " if given.relays else ""
    left = f"--first {given.first + done} --seeds {given.seeds - done}"
    return f"python -m loadtest.lab.dst {relays}{left} --jobs {given.jobs} --within {given.within:g}"
