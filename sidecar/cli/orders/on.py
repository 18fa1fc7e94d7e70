"""`sidecar on`: a model that calls start again."""

from __future__ import annotations

import argparse

from sidecar.cli.orders import order

DESCRIPTION = "Switch a model on that was switched off."
EXAMPLES = f"""\
Calls may have the model again: the next one starts it, a pinned one starts at once. `sidecar ensure MODEL` has it
ready before the first call. For one that is not off nothing changes.

{order.STATUSES}

examples:
  sidecar on llama-3-8b
  sidecar ensure llama-3-8b                      have it ready before the first call"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    order.add_arguments(parser)


def command(given: argparse.Namespace) -> int:
    """Switch it on. Raises Mistake, Impossible."""
    return order.carried_out(given, "on")
