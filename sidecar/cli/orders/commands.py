"""Commands that order something of one model: `sidecar ensure`, `sleep`, `off`, `on`."""

from __future__ import annotations

import argparse

import msgspec

from sidecar.cli.orders.order import STATUSES, add_arguments, carried_out
from sidecar.cli.orders.progress import Order


class OrderCommand(msgspec.Struct, frozen=True):
    """A command as a module of one would be, for `with_commands`."""

    order: Order
    DESCRIPTION: str
    about: str
    examples: str

    @property
    def EXAMPLES(self) -> str:  # noqa: N802 # a module's constant elsewhere
        """The end of its help."""
        return f"{self.about}\n\n{STATUSES}\n\nexamples:\n{self.examples}"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare its flags."""
        add_arguments(parser)

    def command(self, given: argparse.Namespace) -> int:
        """Give the order. Raises Mistake, Impossible."""
        return carried_out(given, self.order)


ENSURE = OrderCommand(
    "ensure",
    "Have a model ready: start or wake it.",
    """\
Starts or wakes the model as soon as that can be, as a call for it would, and waits until it serves. Others make room by
the usual rules: only idle ones sleep or stop. A failed start is told, and tried again by itself; the command fails once
the sidecar gives up or nothing can help. It tries again what has failed too often. A model that is off stays off:
`sidecar on` comes first. Afterwards the model sleeps or stops by its profile, as always.""",
    """\
  sidecar ensure llama-3-8b                      wait until it serves
  sidecar ensure llama-3-8b --timeout 10m""",
)
SLEEP = OrderCommand(
    "sleep",
    "Put a model to sleep now.",
    """\
Gateways send the model nothing more; calls under way have 60 s to end, then the model sleeps, by the level of its
profile. Where they do not end in time it stays awake, and the command fails: no call is cut off. The next call wakes
it. A profile with `sleep: null` or `pin: true` does not sleep: `sidecar stop MODEL` ends its engine.""",
    """\
  sidecar sleep llama-3-8b""",
)
OFF = OrderCommand(
    "off",
    "Switch a model off until it is switched on.",
    """\
Gateways send the model nothing more, and its engine ends when its calls have; those that still run after 60 s are cut
off. Calls for it are refused with 503 `model_off`, without Retry-After, and it leaves GET /v1/models. No call, gateway,
pin or `ensure` starts it, nor a restart of the sidecar: the state file keeps it. `sidecar on MODEL` ends it. Another
profile of the same model, here or on another machine, goes on serving it.""",
    """\
  sidecar off llama-3-8b                         wait until its engine has ended
  sidecar on llama-3-8b                          the end of it""",
)
ON = OrderCommand(
    "on",
    "Switch a model on that was switched off.",
    """\
Calls may have the model again: the next one starts it, a pinned one starts at once. `sidecar ensure MODEL` has it
ready before the first call. For one that is not off nothing changes.""",
    """\
  sidecar on llama-3-8b
  sidecar ensure llama-3-8b                      have it ready before the first call""",
)
