"""Commands that order something of one model: `sidecar ensure`, `sleep`, `off`, `on`, and `stop MODEL` (stop.py).

An order goes to the sidecar that runs. Its progress is told on standard error, and then its end.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from typing import Literal
from urllib.parse import quote

import msgspec

from gateway.shared.command_line import Impossible, argument
from gateway.shared.files.units import SECONDS
from gateway.shared.formatting import seconds, shown
from gateway.shared.protocol import NO_MEMORY, ModelReport, ProtocolError, ensured
from sidecar.cli.files import File, add_config
from sidecar.control.client import Rejected
from sidecar.core.status import Status

Order = Literal["ensure", "sleep", "stop", "off", "on"]
GRACE = 1.5  # seconds for a model to be sized again, before the reason why it cannot be had counts
LATE = 3  # exit status: not done within --timeout
TIMEOUT = 3600.0  # seconds, unless told
FIRST_PAUSE, LAST_PAUSE = 0.1, 1.0  # seconds between two looks
STATUSES = """\
exit status: 0 done; 1 refused or failed, standard error says why; 2 a mistake in the command or the file;
3 not done within --timeout, and it goes on"""


class Progress(msgspec.Struct, frozen=True):
    """Progress of an order. `words`: the model's state. `ended`: the order is over; `failed`: the state is not the
    ordered one."""

    words: str
    ended: bool = False
    failed: bool = False


def progress(order: Order, model: ModelReport, *, calls: int, after: float) -> Progress:
    """Return the progress of an order, by the model's report `after` seconds after it. `calls`: in flight."""
    how, still = _how(model), model.pending is None
    has_engine = model.state in ("starting", "running", "sleeping")
    match order:
        case "ensure":
            if model.state == "running" and still:
                return Progress("running", ended=True)
            if model.ready_in is None and model.why != NO_MEMORY and after >= GRACE:
                return Progress(model.message or model.last_error or how, ended=True, failed=True)
            return Progress(how)
        case "sleep":
            if model.state == "sleeping" and still:
                return Progress(how, ended=True)
            if not still:
                return Progress(_with_calls(how, calls))
            why = f": {model.last_error}" if model.last_error else ": its calls went on for too long, or it was wanted"
            return Progress(f"it is {how}{'' if model.state == 'stopped' else why}", ended=True, failed=True)
        case "on":
            return Progress(how, ended=True)
    if still and not has_engine:
        return Progress(how, ended=True)
    if model.pending in (None, "start", "wake"):
        return Progress(f"it is {how}: it was wanted again", ended=True, failed=True)
    return Progress(_with_calls(how, calls))


def _how(model: ModelReport) -> str:
    level = f" at level {model.sleep_level}" if model.state == "sleeping" and model.sleep_level else ""
    words = [f"{model.state}{level}"]
    if model.pending is not None:
        words.append(f"{model.pending} under way")
    if model.ready_in:
        words.append(f"ready in {seconds(model.ready_in)}")
    told = model.message or model.last_error
    return ", ".join(words) + (f": {told}" if told else "")


def _with_calls(how: str, calls: int) -> str:
    return f"{how}, {calls} call{'s' * (calls != 1)} under way" if calls else how


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
    """Progress of the order at its end, or at `until`, in monotonic seconds. Tell each change. Give the order again
    while another transition is under way. Raises Impossible."""
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
    """Report of the model that the order is given for, or the reason why it cannot be given yet. Raises Impossible."""
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


class OrderCommand(msgspec.Struct, frozen=True):
    """A command as a module of one would be, for a Program."""

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
