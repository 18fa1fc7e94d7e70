"""`sidecar logs`: the last lines that a model's engine has written."""

from __future__ import annotations

import argparse
import sys
from urllib.parse import quote

from gateway.shared.formatting import shown
from sidecar.cli.diagnose import in_words
from sidecar.cli.files import File, add_config
from sidecar.control.api import MOST_LINES
from sidecar.core.diagnosis import NONE, UNKNOWN, diagnosis

DESCRIPTION = "Show what a model's engine has written."
EXAMPLES = """\
The last lines that the model's engine has written, and after a failure what they say went wrong (on standard error).
Its file in `log_dir` has more.

examples:
  sidecar logs llama-3-8b
  sidecar logs llama-3-8b -n 1000
  tail -F sidecar-logs/llama-3-8b.log            what it writes from now on, also over restarts"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("model", metavar="MODEL", help="the name of its profile")
    parser.add_argument("-n", dest="lines", type=_lines, default=200, metavar="N", help="lines (default: %(default)s)")


def command(given: argparse.Namespace) -> int:
    """The last lines of a model's engine. Raises Mistake, Impossible."""
    file = File(given.config)
    profile = file.profile(given.model)
    text = file.ask(f"/models/{quote(profile)}/logs?lines={given.lines}").decode(errors="replace")
    lines = text.split("\n")
    for line in lines[:-1]:
        print(shown(line))
    found = diagnosis(lines)
    if found.kind not in (NONE, UNKNOWN):
        print(f"sidecar: {in_words(found)}", file=sys.stderr)
    if not text:
        print(f"sidecar: the engine of {profile} has written nothing, or there is none", file=sys.stderr)
    return 0


def _lines(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MOST_LINES):
        raise argparse.ArgumentTypeError(f"a number from 1 to {MOST_LINES}, not {text!r}")
    return int(text)
