"""`sidecar sleep`: a model put to sleep."""

from __future__ import annotations

import argparse

from sidecar.cli.orders import order

DESCRIPTION = "Put a model to sleep now."
EXAMPLES = f"""\
Gateways send the model nothing more; calls under way have 60 s to end, then the model sleeps, by the level of its
profile. Where they do not end in time it stays awake, and the command fails: no call is cut off. The next call wakes
it. A profile with `sleep: null` or `pin: true` does not sleep: `sidecar stop MODEL` ends its engine.

{order.STATUSES}

examples:
  sidecar sleep llama-3-8b
  sidecar sleep llama-3-8b --no-wait"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    order.add_arguments(parser)


def command(given: argparse.Namespace) -> int:
    """Put it to sleep. Raises Mistake, Impossible."""
    return order.carried_out(given, "sleep")
