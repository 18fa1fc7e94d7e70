"""`sidecar drain`: a model without calls."""

from __future__ import annotations

import argparse

from sidecar.cli.orders import order

DESCRIPTION = "Withdraw a model from calls, and keep it loaded."
EXAMPLES = f"""\
Gateways send the model nothing more, and the command waits until its calls have ended. Its engine stays as it is, with
its memory. New calls are refused with 503 and told to come back in 5 s. `sidecar ensure MODEL` ends it, and so does a
restart of the sidecar.

{order.STATUSES}

examples:
  sidecar drain llama-3-8b                       before you look at its engine
  sidecar drain llama-3-8b --timeout 5m
  sidecar ensure llama-3-8b                      the end of it"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    order.add_arguments(parser)


def command(given: argparse.Namespace) -> int:
    """Withdraw it. Raises Mistake, Impossible."""
    return order.carried_out(given, "drain")
