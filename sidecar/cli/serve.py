"""`sidecar serve`: the sidecar, run until it is told to end."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from gateway.shared.command_line import Mistake
from gateway.shared.fields import made_of
from sidecar.cli.files import File, add_config
from sidecar.control.status_table import table
from sidecar.core.flags import SIMULATED_GPUS
from sidecar.core.status import Status
from sidecar.residency.state_file import Locked
from sidecar.serve.assembly import Secrets
from sidecar.serve.run import Options, StartError, run

DESCRIPTION = "Run the sidecar."
EXAMPLES = """\
It listens on `listen` for the commands beside this one and for a gateway of this machine, on `relay` for gateways of
others, and starts no model before one is wanted (or pinned). SIGTERM or Ctrl-C ends the sidecar and leaves its engines
running, and the next start takes them over: calls of a gateway on this machine go on, those through the relay have 30 s
to end. Started again after it was killed, it does the same.

When the file is saved, or on SIGHUP, it is read again, and the log says what that changes. One with mistakes changes
nothing. A model whose engine would be started otherwise gets no new calls, and its engine ends once those that run have
ended, after 10 min at most; one that is gone ends in the same way. Addresses and GPUs count at the next start, the
content of the tokens' and certificates' files at once.

examples:
  sidecar serve                                  with ./sidecar.yaml
  sidecar serve --config /etc/weir/sidecar.yaml
  sidecar serve --end-engines                    SIGTERM and Ctrl-C end the engines too"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--end-engines", action="store_true", help="end the engines whenever the sidecar ends")
    parser.add_argument("--end-with-parent", action="store_true", help="end when standard input ends")
    parser.add_argument(
        "--gateway", metavar="URL", help="the control port of a gateway to report to, beside the file's"
    )
    parser.add_argument(
        "--log-format",
        choices=("json", "text"),
        help="of the lines on standard error: json for programs, text for people (default: text at a terminal)",
    )
    parser.add_argument(
        "--gpus-from",
        metavar="FOLDER",
        default=os.environ.get(SIMULATED_GPUS) or None,
        help=f"for a trial: GPUs that FOLDER simulates (see sidecar/gpus/simulated.py); default: ${SIMULATED_GPUS}",
    )


def command(given: argparse.Namespace) -> int:
    """Run until it is told to end. Raises Mistake."""
    gpus_from = None if given.gpus_from is None else Path(given.gpus_from)
    if gpus_from is not None and not gpus_from.is_dir():
        raise Mistake(f"--gpus-from {gpus_from}: there is no such folder")
    file = File(given.config)
    if given.gateway is not None:
        file.report_to(given.gateway)
    options = made_of(
        Options,
        given,
        announce=_announce,
        file=file.path,
        config=file.config,
        secrets=Secrets(tokens=file.tokens, ca=file.ca),
        gpus_from=gpus_from,
    )
    try:
        run(options)
    except (StartError, Locked) as error:
        raise Mistake(str(error)) from error
    return 0


def _announce(status: Status) -> None:
    try:
        print(table(status), flush=True)
    except BrokenPipeError:  # `sidecar serve | head -1`: whoever read it has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
