"""Figures of the design in virtual time, as a table.

The whole gateway runs in this process, over simulated engines and in virtual time: four engines at ten times the load
they can carry take seconds, and the same seed gives the same numbers.

  python -m loadtest.lab.figures --rows prefill       one row only

rows:
  retry-after  clients that come back when they are told to, under overload and over a limit: how many are admitted
  prefill  prompts read on another engine: all mixed, all split, and decided per call, of four A100s: calls in time;
           first token (mean, p99); between tokens (p99); per token (p99)
  batches  endless batches beside people at 0.6 times the capacity: tokens answered, first token of the people
  money    calls for a provider, at 0.8, 1.5 and 3 times the capacity: in time, share that leaves, money over the least

Clients give up at their class's deadline. loadtest/lab/figures/runs.py says what engines and traffic these are.

A figure stands beside its milestone. Exit status 0: measured, whatever came of it; 1: a gateway has left something
behind, which is a bug; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from loadtest.lab.figures import batches, load, money, prefill
from loadtest.lab.figures.runs import Setting
from loadtest.lab.rows import Row, parser_of, table_of

ROWS: dict[str, Callable[[Setting], list[Row]]] = {
    "retry-after": load.retry_after,
    "prefill": prefill.row_prefill,
    "money": money.row_money,
    "batches": batches.row_batches,
}


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line. Exits with status 2 where it cannot be understood."""
    parser = parser_of("figures", __doc__)
    parser.add_argument("--rows", default=",".join(ROWS), help="which rows (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of traffic, engines and the gateway (default: 1)")
    parser.add_argument("--chats", type=Path, metavar="FILE", help="row prefill: a trace of conversations, Azure's")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="row prefill: a trace of long prompts, Mooncake's")
    options = parser.parse_args(argv)
    options.rows = options.rows.split(",")
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"--rows: there is no row {', '.join(sorted(unknown))}; one of {', '.join(ROWS)}")
    return options


def main(argv: list[str] | None = None) -> int:
    """Measure and print; the exit status."""
    options = arguments(sys.argv[1:] if argv is None else argv)
    wanted = [ROWS[name] for name in options.rows]
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # as the gateway: what lives as long as the process is not worth a scan
    setting = Setting(
        seed=options.seed,
        progress=_tell,
        traces={name: file for name in ("chats", "prompts") if (file := getattr(options, name))},
    )
    rows = [row for measure in wanted for row in measure(setting)]
    print(file=sys.stderr)
    return told(Console(width=max(180, Console().width)), setting, rows)


def _tell(what: str, share: float) -> None:
    print(f"\r{what}: {share:.0%}\033[K", end="", file=sys.stderr, flush=True)


def told(console: Console, setting: Setting, rows: list[Row]) -> int:
    """Print the rows, and what the runs behind them left over; the exit status."""
    console.print(table_of(rows))
    for each in setting.left:
        console.print(f"[red]{each}[/]")
    return 1 if setting.left else 0


if __name__ == "__main__":
    sys.exit(main())
