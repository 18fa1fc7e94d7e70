"""`sidecar status`: GPUs, models, gateways, and troubles, as the sidecar that runs reports them."""

from __future__ import annotations

import argparse
import sys
import time

from sidecar.cli.files import File, add_config
from sidecar.control.status_table import table
from sidecar.core.status import Status

EVERY = 1.0  # seconds between two looks of `--watch`
CLEAR = "\x1b[H\x1b[2J"

DESCRIPTION = "Show what is resident."
EXAMPLES = """\
examples:
  sidecar status                                 a table: GPUs, models, gateways, and what is wrong
  sidecar status --watch                         again every second, until Ctrl-C
  sidecar status --json                          for programs; GET /status of the control API says the same"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--watch", action="store_true", help="again every second")


def command(given: argparse.Namespace) -> int:
    """Print the sidecar's status, once or repeatedly. Raises Mistake, Impossible."""
    file = File(given.config, to_ask=True)
    while True:
        text = file.ask("/status").decode(errors="replace") if given.json else table(file.read(Status, "/status"))
        print(f"{CLEAR if given.watch and sys.stdout.isatty() else ''}{text}", flush=True)
        if not given.watch:
            return 0
        time.sleep(EVERY)
