"""Laws of residency over random machines: which models have GPU memory, whatever goes wrong there.

The sidecar's manager runs in this process, over simulated engines and GPUs and in virtual time. Each machine has GPUs,
models, wrong estimates and faults of its own, drawn from a seed. A law is broken by a stuck model, memory beyond a GPU,
a call lost without an error, and whatever else must never be (loadtest/lab/residency/laws.py).

  python -m loadtest.lab.residency                    the machines of the seeds 1 to 100, on every core
  python -m loadtest.lab.residency --machines 1000    a thousand of them
  python -m loadtest.lab.residency --machine SEED     one of them, and all that befell it

Exit status 0: every law held; 1: one was broken, on the machines that are named; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import sys

from loadtest.lab.residency.laws import replay, survey
from loadtest.lab.rows import parser_of


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line. Exits with status 2 where it cannot be understood."""
    parser = parser_of("residency", __doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first machine (default: 1)")
    parser.add_argument("--machines", type=int, default=100, metavar="N", help="how many (default: 100)")
    parser.add_argument("--machine", type=int, metavar="SEED", help="the machine of one seed, and all that befell it")
    options = parser.parse_args(argv)
    if options.machines < 1:
        parser.error("--machines must be at least 1")
    return options


def main(argv: list[str] | None = None) -> int:
    """Look and print; the exit status."""
    options = arguments(sys.argv[1:] if argv is None else argv)
    if options.machine is not None:
        return replay(options.machine)
    return survey(range(options.seed, options.seed + options.machines))


if __name__ == "__main__":  # not in a worker process, which imports this module under another name
    sys.exit(main())
