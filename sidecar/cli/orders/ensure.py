"""`sidecar ensure`: a model made ready."""

from __future__ import annotations

import argparse

from sidecar.cli.orders import order

DESCRIPTION = "Have a model ready: start or wake it."
EXAMPLES = f"""\
Starts or wakes the model as soon as that can be, as a call for it would, and waits until it serves. Others make room by
the usual rules: only idle ones sleep or stop. A failed start is told, and tried again by itself; the command fails once
the sidecar gives up or nothing can help. It ends a `drain`, and tries again what has failed too often. A model that is
off stays off: `sidecar on` comes first. Afterwards the model sleeps or stops by its profile, as always.

{order.STATUSES}

examples:
  sidecar ensure llama-3-8b                      wait until it serves
  sidecar ensure llama-3-8b --timeout 10m --json
  sidecar ensure llama-3-8b --no-wait            only have it begun"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    order.add_arguments(parser)


def command(given: argparse.Namespace) -> int:
    """Have it ready. Raises Mistake, Impossible."""
    return order.carried_out(given, "ensure")
