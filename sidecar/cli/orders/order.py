"""An order to the sidecar that runs: given, watched with progress on standard error, and its end told."""

from __future__ import annotations

import argparse
import re
import sys
import time
from urllib.parse import quote

from gateway.shared.command_line import argument
from gateway.shared.files.units import SECONDS
from gateway.shared.formatting import seconds, shown
from gateway.shared.protocol import ModelReport, ProtocolError, ensured
from sidecar.cli.errors import Impossible
from sidecar.cli.files import File, add_config
from sidecar.cli.orders.progress import Order, Progress, progress
from sidecar.control.client import Rejected
from sidecar.core.status import Status

LATE = 3  # exit status: not done within --timeout
TIMEOUT = 3600.0  # seconds, unless told
FIRST_PAUSE, LAST_PAUSE = 0.1, 1.0  # seconds between two looks
STATUSES = """\
exit status: 0 done; 1 refused or failed, standard error says why; 2 a mistake in the command or the file;
3 not done within --timeout, and it goes on"""


def add_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """`optional`: the command can do without a model."""
    add_config(parser)
    parser.add_argument("model", metavar="MODEL", nargs="?" if optional else None, help="the name of its profile")
    parser.add_argument(
        "--timeout", type=argument(_duration), default=TIMEOUT, metavar="TIME",
        help="wait no longer than this: 90s, 10m, 1h (default: 1h)",
    )  # fmt: skip


def carried_out(given: argparse.Namespace, order: Order) -> int:
    """Give the order and wait for its end; the exit status. Raises Mistake, Impossible."""
    file = File(given.config)
    profile = file.profile(given.model)
    began = time.monotonic()
    found = _watched(file, profile, order, began + given.timeout)
    words, took = shown(found.words), seconds(time.monotonic() - began)
    if not found.ended:
        print(f"sidecar: {profile}: not done after {took}, and it goes on: {words}", file=sys.stderr)
        return LATE
    if found.failed:
        raise Impossible(f"{profile}: {words}")
    print(f"{profile}: {words}{f' (after {took})' if order != 'on' else ''}")
    return 0


def _watched(file: File, profile: str, order: Order, until: float) -> Progress:
    """How far the order is `until` then, told at each change. Where something else is under way it is given again.
    Raises Impossible."""
    told = ""

    def tell(words: str) -> None:
        nonlocal told
        plain = re.sub(r"ready in [^,:]*", "on its way", words)
        if plain != told:
            told = plain
            print(f"{profile}: {shown(words)}", file=sys.stderr, flush=True)

    while isinstance(model := _given(file, profile, order), str):
        tell(model)
        if time.monotonic() >= until:
            return Progress(model)
        time.sleep(LAST_PAUSE)
    ordered, pause, calls = time.monotonic(), FIRST_PAUSE, 0
    while True:
        found = progress(order, model, calls=calls, after=time.monotonic() - ordered)
        if found.ended or time.monotonic() >= until:
            return found
        tell(found.words)
        time.sleep(min(pause, max(0.0, until - time.monotonic())))
        pause = min(LAST_PAUSE, 1.5 * pause)
        status = file.read(Status, "/status")
        reports = [each for each in status.models if each.profile == profile]
        if not reports:
            raise Impossible(f"{profile} is no longer in the file of the sidecar that runs")
        model, calls = reports[0], status.calls.get(profile, 0)


def _given(file: File, profile: str, order: Order) -> ModelReport | str:
    """The answer to the order, or why it cannot be given yet. Raises Impossible."""
    try:
        return ensured(file.ask(f"/models/{quote(profile)}/{order}", "POST")).model
    except ProtocolError as error:
        raise Impossible(f"what answers at {file.client.address} is another version's: {error}") from error
    except Impossible as refused:
        said = refused.__cause__
        if not isinstance(said, Rejected) or said.code != "not_now":
            raise
        return str(refused)


def _duration(text: str) -> float:
    value = SECONDS.parse(text if text[-1:].isalpha() else f"{text}s")
    if not value:
        raise ValueError(f"a time such as 90s, 10m or 1h, not {text!r}")
    return value
