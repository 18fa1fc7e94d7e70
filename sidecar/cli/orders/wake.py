"""`sidecar wake`: a sleeping model awake."""

from __future__ import annotations

import argparse

from sidecar.cli.orders import order

DESCRIPTION = "Wake a model that sleeps."
EXAMPLES = f"""\
As `sidecar ensure`, for a model that sleeps; one that is stopped is refused, since starting it may take minutes. Others
make room by the usual rules: only idle ones sleep or stop.

{order.STATUSES}

examples:
  sidecar wake llama-3-8b
  sidecar wake llama-3-8b --timeout 30s --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    order.add_arguments(parser)


def command(given: argparse.Namespace) -> int:
    """Wake it. Raises Mistake, Impossible."""
    return order.carried_out(given, "wake")
