"""`sidecar off`: a model that nobody starts."""

from __future__ import annotations

import argparse

from sidecar.cli.orders import order

DESCRIPTION = "Switch a model off until it is switched on."
EXAMPLES = f"""\
Gateways send the model nothing more, and its engine ends when its calls have; those that still run after 60 s are cut
off. Calls for it are refused with 503 `model_off`, without Retry-After, and it leaves GET /v1/models. No call, gateway,
pin or `ensure` starts it, nor a restart of the sidecar: the state file keeps it. `sidecar on MODEL` ends it. Another
profile of the same model, here or on another machine, goes on serving it.

{order.STATUSES}

examples:
  sidecar off llama-3-8b                         wait until its engine has ended
  sidecar off llama-3-8b --no-wait
  sidecar on llama-3-8b                          the end of it"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    order.add_arguments(parser)


def command(given: argparse.Namespace) -> int:
    """Switch it off. Raises Mistake, Impossible."""
    return order.carried_out(given, "off")
