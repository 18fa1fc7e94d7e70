"""An order to the sidecar that runs: given, watched with progress on standard error, and its end told."""

from __future__ import annotations

import argparse
import math
import re
import shutil
import sys
import time
from urllib.parse import quote

import msgspec

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
    parser.add_argument("--no-wait", action="store_true", help="give the order and do not wait for its end")
    parser.add_argument(
        "--timeout", type=argument(_duration), default=TIMEOUT, metavar="TIME",
        help="wait no longer than this: 90s, 10m, 1h (default: 1h)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="the model's last report as JSON, and no progress")


def carried_out(given: argparse.Namespace, order: Order) -> int:
    """Give the order and wait for its end; the exit status. Raises Mistake, Impossible."""
    file = File(given.config)
    profile = file.profile(given.model)
    shows = _Shows(profile, quiet=given.json)
    began = time.monotonic()
    try:
        model = _given(file, profile, order, shows, math.inf if given.no_wait else began + given.timeout)
        if not given.no_wait and model is not None:
            model, found = _watched(file, profile, order, model, shows, began, given.timeout)
        else:
            found = None
    finally:
        shows.close()
    if model is not None and given.json:
        print(msgspec.json.encode(model).decode())
    took = time.monotonic() - began
    if model is None or (found is not None and not found.ended):
        words = shown(found.words) if found else "it cannot be ordered yet"
        print(f"sidecar: {profile}: not done after {seconds(took)}, and it goes on: {words}", file=sys.stderr)
        return LATE
    if found is not None and found.failed:
        raise Impossible(f"{profile}: {shown(found.words)}")
    if not given.json:
        words = shown(found.words) if found else f"{order} is ordered"
        print(f"{profile}: {words}{f' (after {seconds(took)})' if found and order != 'on' else ''}")
    return 0


def _given(file: File, profile: str, order: Order, shows: _Shows, until: float) -> ModelReport | None:
    """The answer to the order. Where something else is under way it is tried again `until` then, None: in vain;
    infinite: it is not tried again. Raises Impossible."""
    while True:
        try:
            return ensured(file.ask(f"/models/{quote(profile)}/{order}", "POST")).model
        except ProtocolError as error:
            raise Impossible(f"what answers at {file.client.address} is another version's: {error}") from error
        except Impossible as refused:
            said = refused.__cause__
            if not isinstance(said, Rejected) or said.code != "not_now" or until == math.inf:
                raise
            shows(Progress(str(refused)))
        if time.monotonic() >= until:
            return None
        time.sleep(LAST_PAUSE)


def _watched(
    file: File, profile: str, order: Order, model: ModelReport, shows: _Shows, began: float, timeout: float
) -> tuple[ModelReport, Progress]:
    """The model's last report, and how far the order then is: ended, unless the time is up. Raises Impossible."""
    ordered, pause = time.monotonic(), FIRST_PAUSE
    found = progress(order, model, calls=0, after=0.0)
    while not found.ended and time.monotonic() < began + timeout:
        shows(found)
        time.sleep(min(pause, max(0.0, began + timeout - time.monotonic())))
        pause = min(LAST_PAUSE, 1.5 * pause)
        status = file.read(Status, "/status")
        reports = [each for each in status.models if each.profile == profile]
        if not reports:
            raise Impossible(f"{profile} is no longer in the file of the sidecar that runs")
        model = reports[0]
        found = progress(order, model, calls=status.calls.get(profile, 0), after=time.monotonic() - ordered)
    return model, found


class _Shows:
    """Progress on standard error: on a terminal one line that changes, elsewhere a line at each change."""

    def __init__(self, profile: str, *, quiet: bool) -> None:
        self._profile = profile
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._began = time.monotonic()
        self._last = ""

    def __call__(self, found: Progress) -> None:
        words = shown(found.words)
        if self._quiet:
            return
        if self._live:
            line = f"{self._profile}: {words} ({seconds(time.monotonic() - self._began)})"
            print(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)
        elif (plain := re.sub(r"ready in [^,:]*", "on its way", words)) != self._last:
            self._last = plain
            print(f"{self._profile}: {words}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the line clean."""
        if self._live and not self._quiet:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _duration(text: str) -> float:
    value = SECONDS.parse(text if text[-1:].isalpha() else f"{text}s")
    if not value:
        raise ValueError(f"a time such as 90s, 10m or 1h, not {text!r}")
    return value
