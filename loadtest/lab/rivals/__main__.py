"""Comparison of Weir with no policy with its rivals: processes, or virtual time.

Runs each load over four simulated engines, the same for all rivals and fresh for each run. Prints the medians of the
rounds, a row a rival, and whether Weir (`gateway serve` with no policy) reaches its goals. The number in a load's name
is the share of the capacity. Rivals are weir, vllm-router with its default or another policy (vllm-router:round_robin),
direct and round_robin (nothing before the engines). vllm-router is found on the PATH or named by $VLLM_ROUTER, else it
is left out.

  python -m loadtest.lab.rivals --only agents-tight,agents-ample --rounds 3
  python -m loadtest.lab.rivals --chats azure.csv --prompts mooncake.jsonl
  python -m loadtest.lab.rivals --virtual --only agents-tight --rounds 5     rivals' rules, in virtual time
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from loadtest.bench.rivals import ROUTER, absent, is_rival, parse_compared
from loadtest.lab.rivals.loads import LOADS, RivalLoad
from loadtest.lab.rivals.runs import WEIR, RivalRow, in_virtual_time, medians, over_processes, row, verdict
from loadtest.lab.rows import parser_of
from loadtest.load.scenario import Scenario
from loadtest.load.scenario_flags import seconds, whole
from loadtest.processes import ChildError
from loadtest.report.records import Run
from loadtest.report.report import write
from loadtest.simulate.rivals.rules import RULES

PROCESSES = (WEIR, ROUTER, f"{ROUTER}:round_robin")
REFERENCE = {False: ROUTER, True: "cache_aware"}  # whom goals are against; True: in virtual time
COLUMNS = ("", "hits", "TTFT mean", "p50", "p90", "p99", "end to end", "in time", "tokens/s in time", "refused",
           "mean, spread", "lag p99")  # fmt: skip


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with status 2 where it cannot be understood."""
    parser = parser_of("rivals", __doc__)
    parser.add_argument("--only", metavar="LOADS", help=f"loads (default: all): {', '.join(LOADS)}")
    parser.add_argument(
        "--rivals", metavar="NAMES", help=f"in this order (default: {','.join(PROCESSES)}; of --virtual all rules)"
    )
    parser.add_argument("--rounds", type=whole(1, 100), default=1, help="runs of each, a seed each (default: 1)")
    parser.add_argument("--seconds", type=seconds, default=40.0, help="of loads that have a rate (default: 40)")
    parser.add_argument("--chats", type=Path, metavar="FILE", help="a trace for the chats: Azure's conversations")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="one for the long prompts: Mooncake's, or Azure's code"
    )
    parser.add_argument(
        "--think", type=seconds, metavar="TIME",
        help="turns of --prompts go out so long after their answers, on average (default: each at a time of its own)",
    )  # fmt: skip
    parser.add_argument("--virtual", action="store_true", help="in virtual time, beside rivals' rules")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="draw each load's first round, in FOLDER/LOAD/report.html"
    )
    given = parser.parse_args(argv)
    given.only = given.only.split(",") if given.only else list(LOADS)
    known = (WEIR, *RULES) if given.virtual else None
    try:
        names = (given.rivals or ",".join(known or PROCESSES)).split(",")
        others = [name for name in names if name != WEIR]
        if known and (unknown := [name for name in names if name not in known]):
            raise ValueError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        if others and not known:
            parse_compared(",".join(others))
    except ValueError as error:
        parser.error(f"--rivals: {error}")
    if unknown := [name for name in given.only if name not in LOADS]:
        parser.error(f"--only: {unknown[0]!r} is not one of {', '.join(LOADS)}")
    given.rivals = names
    if any(is_rival(name) for name in names) and (why := absent()):
        print(f"{ROUTER} is left out: {why}", file=sys.stderr)
        given.rivals = [name for name in names if not is_rival(name)]
    return given


Runs = Mapping[str, Sequence[tuple[Run, float]]]  # of each rival, with the hits


def chosen(given: argparse.Namespace) -> dict[str, RivalLoad]:
    """The loads, with the files that were given."""
    files: Mapping[str, Path | None] = {"chats": given.chats, "prompts": given.prompts}
    found = {}
    for name in given.only:
        load, file = LOADS[name], files.get(LOADS[name].trace)
        found[name] = load if file is None else load.replayed(file, given.think if file == given.prompts else None)
    return found


def compare(load: RivalLoad, scenario: Scenario, given: argparse.Namespace, folder: Path) -> Runs:
    """The runs of each rival, every other round turned round. Raises ChildError."""
    measure = in_virtual_time if given.virtual else over_processes
    rivals = list(dict.fromkeys([*given.rivals, *load.rivals]))
    runs: dict[str, list[tuple[Run, float]]] = {name: [] for name in rivals}
    for number in range(given.rounds):
        seeded = msgspec.structs.replace(scenario, seed=scenario.seed + number)
        for name in rivals if number % 2 == 0 else reversed(rivals):
            runs[name].append(measure(load, name, seeded, folder))
    return runs


def shown(title: str, runs: Runs, load: RivalLoad, reference: str) -> tuple[Table, list[str]]:
    """A row a rival, and one for each class that goals name; the verdicts."""
    table = Table(*COLUMNS, title=title)
    rows: dict[tuple[str, str], RivalRow] = {}
    for name, made in runs.items():
        for class_name in dict.fromkeys(["", *(goal.class_name for goal in load.goals)]):
            each = [row(run, hits, class_name) for run, hits in made]
            rows[name, class_name] = medians(each)
            table.add_row(f"  {class_name}" if class_name else name, *cells(rows[name, class_name], each))
    said = []
    for goal in load.goals:
        own, other = rows.get((WEIR, goal.class_name)), rows.get((goal.against or reference, goal.class_name))
        if own is not None and other is not None:
            said.append(verdict(goal, own, other)[1])
    return table, said


def cells(one: RivalRow, each: Sequence[RivalRow]) -> list[str]:
    """Medians, and the least and most mean TTFT of the rounds."""
    times = [f"{one[name]:.3f}" for name in ("mean", "p50", "p90", "p99", "e2e")]
    means = [part["mean"] for part in each]
    counts = [f"{one['in_time']:g}", f"{one['goodput']:,.0f}", f"{one['refused']:g}"]
    return [f"{one['hits']:.0%}", *times, *counts, f"{min(means):.3f}-{max(means):.3f}", f"{one['lag'] * 1e3:.0f} ms"]


def main(argv: list[str] | None = None) -> int:
    """Measure and print; the exit status: 1 where a process failed, 2 for a mistake."""
    given = arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # else processes would be left behind
    console = Console(width=max(150, Console().width))
    try:
        with tempfile.TemporaryDirectory(prefix="rivals-") as scratch:
            for name, load in chosen(given).items():
                scenario = load.at(load.capacity() if load.share else 0.0, given.seconds)
                runs = compare(load, scenario, given, Path(scratch))
                title = f"{name}, {scenario.rate:.2f}/s" if scenario.rate else name
                table, said = shown(title, runs, load, REFERENCE[given.virtual])
                console.print(table)
                for line in said:
                    console.print(line, highlight=False, style="red" if line.endswith("MISSED") else "")
                if given.out is not None:
                    drawn = write([made[0][0] for made in runs.values()], given.out / name, force=True)
                    console.print(drawn.problem or str(drawn.files[0]), highlight=False, soft_wrap=True)
    except ChildError as error:
        print(f"loadtest.lab.rivals: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
