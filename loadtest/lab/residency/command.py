"""Figures of residency: which models have GPU memory, and what that costs.

The sidecar's manager runs in this process, over simulated engines and GPUs and in virtual time: hours of calls take
seconds, and the same seed gives the same numbers.

  python -m loadtest.lab.residency --quick              a first look: every row, short runs
  python -m loadtest.lab.residency --rows turns         some rows only
  python -m loadtest.lab.residency --machines 1000      the laws, over random machines with faults, on every core

rows:
  turns   three models in turn on memory for two: loads a minute
  rounds  three models in turn on two GPUs without a pause: whether they wake or start

with --machines N, in their place: N random machines, each with GPUs, models, wrong estimates and faults of its own:
  laws    stuck models, memory beyond a GPU, calls lost without an error, and whatever else must never be
          (loadtest/lab/residency/laws.py); a machine that breaks one is named: --machine SEED runs it again

Exit status 0: every target is met; 1: one is missed; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from loadtest.lab.residency import figures
from loadtest.lab.residency.laws import replay, survey
from loadtest.lab.rows import OnProgress, Row, add_arguments, bars, chosen, parser_of, report, terminal

ROWS: dict[str, Callable[[OnProgress, float], list[Row]]] = {
    "turns": figures.turns,
    "rounds": figures.rounds,
}


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line. Exits with status 2 where it cannot be understood."""
    parser = parser_of("residency", __doc__)
    add_arguments(parser, ROWS, seeded="calls and faults")
    parser.add_argument("--quick", action="store_true", help="a fifth of the calls")
    parser.add_argument(
        "--machines", type=int, metavar="N", help="the laws over the machines of N seeds from --seed on"
    )
    parser.add_argument("--machine", type=int, metavar="SEED", help="the machine of one seed, and all that befell it")
    options = parser.parse_args(argv)
    if options.machines is not None and options.machines < 1:
        parser.error("--machines must be at least 1")
    options.rows = chosen(parser, options.rows, ROWS)
    return options


def main(argv: list[str] | None = None) -> int:
    """Measure and print; the exit status."""
    options = arguments(sys.argv[1:] if argv is None else argv)
    if options.machine is not None:
        return replay(options.machine)
    began = time.perf_counter()
    console = terminal()
    scale = 0.2 if options.quick else 1.0
    with bars(console) as progress:
        if options.machines is not None:
            rows = survey(range(options.seed, options.seed + options.machines), progress)
        else:
            rows = [row for name in options.rows for row in ROWS[name](progress, scale)]
    return report(console, rows, f"in {time.perf_counter() - began:.0f} s", gate=True)
