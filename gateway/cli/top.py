"""`gateway top`: flags to a watch on a gateway's control port."""

from __future__ import annotations

import argparse

from gateway.cli.control_flags import add_control_flags
from gateway.cli.files import Mistake, admin_token
from gateway.shared.command_line import argument
from gateway.shared.files.units import SECONDS
from gateway.top.show import TopError, show

MISTAKES = (Mistake, TopError)

DESCRIPTION = "Watch a running gateway."
EXAMPLES = """\
Asks the control port of a running gateway once per interval and shows classes, queues, engines with what is held of
their KV cache, models that are not awake, and how calls end. Rates and waits are of the last ten seconds. q or Ctrl-C
ends it. A gateway that goes away is asked until it is back. NO_COLOR is obeyed.

examples:
  gateway top                                                    the gateway on this machine
  gateway top --url http://10.0.0.5:8001 --token-file admin.token
  gateway top --once                                             one frame as plain text, for scripts
  COLUMNS=160 gateway top --once --interval 10s                  as wide as that, with the rates of ten seconds
  gateway top --json                                             a JSON object a line, again and again

Exit status 2: a wrong token, or nothing that is a gateway; 1: no answer to --once or --json."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_control_flags(parser, "a gateway", "its control port")
    parser.add_argument(
        "--interval",
        default="1s",
        type=argument(_interval),
        metavar="TIME",
        help="between two looks: 100ms to 1h (default: %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="one frame as plain text, after one interval")
    parser.add_argument("--json", action="store_true", help="what there is to show as JSON, a line each time")


def command(given: argparse.Namespace) -> int:
    """Watch, or print once. Raises Mistake, TopError."""
    token = admin_token(given.token_file, "--token-file")
    return show(given.url, token, given.interval, just_once=given.once, as_json=given.json)


def _interval(text: str) -> float:
    value = SECONDS.parse(text if text[-1:].isalpha() else f"{text}s")
    if value is None or not 0.1 <= value <= 3600:
        raise ValueError(f"{text!r} is not a time from 100ms to 1h")
    return value
