"""What each command of `sidecar` does; cli.py says what it is given. Each prints, and returns the exit status."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path
from urllib.parse import quote

import msgspec

from sidecar.cli import offline
from sidecar.cli.files import Mistake, checked, token_of
from sidecar.control.api import Stopping
from sidecar.control.client import Asking, NoSidecar, Rejected
from sidecar.control.status_table import announcement, table
from sidecar.core.formatting import shown
from sidecar.core.status import Status
from sidecar.residency.state_file import Locked, StateFile
from sidecar.serve.operator_log import say
from sidecar.serve.run import Options, StartError, run

EVERY = 1.0  # seconds between two looks of `status --watch`
STOP_WITHIN = 90.0  # seconds for a sidecar to end, with its engines
POLL = 0.05  # seconds between two looks whether it has
CLEAR = "\x1b[H\x1b[2J"


class Impossible(Exception):
    """What was asked for cannot be had; the message says why and what to do."""


class File:
    """The sidecar's file at `path`, read. Raises Mistake."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.folder = self.path.absolute().parent
        self.config = checked(self.path)
        self.token = token_of(self.config, self.path)
        self.asking = Asking(self.config, self.token)

    def report_to(self, gateway: str) -> None:
        """Report to another gateway's control port, too. Raises Mistake where the file names no token to show it."""
        if self.token is None:
            raise Mistake(f"{self.path}: token_file: the gateway wants one: `sidecar init` shows how, or sidecar.token")
        if gateway not in self.config.gateways:
            self.config = msgspec.structs.replace(self.config, gateways=(*self.config.gateways, gateway))

    def profile(self, name: str) -> str:
        """Raises Mistake for one that the file does not have."""
        if name not in self.config.models:
            named = [each for each in self.config.models if self.config.served_name(each) == name]
            hint = f"did you mean {named[0]}?" if named else f"it has {', '.join(self.config.models)}"
            raise Mistake(f"{self.path}: there is no profile {name!r} ({hint})")
        return name


def serve(
    config: str,
    *,
    gpus_from: str | None,
    end_engines: bool,
    die_with_parent: bool,
    end_with_parent: bool = False,
    gateway: str | None = None,
) -> int:
    """Run until it is told to end; report to `gateway` beside those of the file. Raises Mistake."""
    file = File(config)
    if gateway is not None:
        file.report_to(gateway)
    options = Options(
        announce=_announce,
        file=file.path,
        config=file.config,
        token=file.token,
        gpus_from=_folder(gpus_from),
        end_engines=end_engines,
        die_with_parent=die_with_parent,
        end_with_parent=end_with_parent,
    )
    try:
        run(options)
    except StartError as error:
        raise Mistake(str(error)) from error
    return 0


def _folder(gpus_from: str | None) -> Path | None:
    if gpus_from is not None and not Path(gpus_from).is_dir():
        raise Mistake(f"--gpus-from {gpus_from}: there is no such folder")
    return None if gpus_from is None else Path(gpus_from)


def _announce(status: Status) -> None:
    try:
        print(announcement(status), flush=True)
    except BrokenPipeError:  # `sidecar serve | head -1`: whoever read it has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def status(config: str, *, as_json: bool, watch: bool) -> int:
    """How everything is. Raises Mistake, Impossible."""
    file = File(config)
    while True:
        answer = _asked(file, "/status")
        if as_json:
            text = answer.decode(errors="replace")
        else:
            try:
                text = table(msgspec.json.decode(answer, type=Status))
            except msgspec.MsgspecError as error:
                raise Impossible(f"what answers at {file.asking.address} is another version's: {error}") from error
        print(f"{CLEAR if watch and sys.stdout.isatty() else ''}{text}", flush=True)
        if not watch:
            return 0
        time.sleep(EVERY)


def plan(config: str, model: str, *, gpus_from: str | None) -> int:
    """What it takes to have a model run. Raises Mistake, Impossible."""
    file = File(config)
    profile = file.profile(model)
    try:
        text = file.asking.ask("GET", f"/models/{quote(profile)}/plan").decode(errors="replace").rstrip("\n")
    except Rejected as said:
        raise Impossible(str(said)) from said
    except NoSidecar:
        text, usable = asyncio.run(offline.explained(file.config, file.folder, profile, _folder(gpus_from)))
        if not usable:
            raise Impossible("\n".join(map(shown, text.split("\n")))) from None
    print("\n".join(map(shown, text.split("\n"))))
    return 0


def logs(config: str, model: str, *, lines: int) -> int:
    """The last lines of a model's engine. Raises Mistake, Impossible."""
    file = File(config)
    profile = file.profile(model)
    text = _asked(file, f"/models/{quote(profile)}/logs?lines={lines}").decode(errors="replace")
    for line in text.split("\n")[:-1]:
        print(shown(line))
    if not text:
        print(f"sidecar: the engine of {profile} has written nothing, or there is none", file=sys.stderr)
    return 0


def stop(config: str, *, engines: bool) -> int:
    """End the sidecar, and its engines if they are to. Raises Mistake, Impossible."""
    file = File(config)
    was_there = True
    try:
        answer = file.asking.ask("POST", "/stop", {"engines": engines})
        running = ", ".join(msgspec.json.decode(answer, type=Stopping).running)
    except (Rejected, msgspec.MsgspecError) as error:
        raise Impossible(str(error)) from error
    except NoSidecar as nobody:
        if not engines:
            print(f"sidecar: {nobody}: nothing to stop (--all ends engines that one has left)", file=sys.stderr)
            return 0
        was_there = False
    else:
        _wait(file)
        left = f"; engines that go on: {running}" if running else "; no engine was running"
        print(f"the sidecar has ended{f' with its engines: {running}' if running and engines else left}")
        if not engines:
            return 0
    try:
        ended = asyncio.run(offline.ended(file.config, file.folder))
    except Locked as locked:
        raise Impossible(f"{locked}; it does not answer at {file.asking.address}: end it by its number") from locked
    if ended or not was_there:
        print(f"ended {', '.join(ended)}" if ended else "no engine was running")
    return 0


def _wait(file: File) -> None:
    """Until the sidecar has given its state file back, which is the last it does. Raises Impossible."""
    state = StateFile(file.folder / file.config.state_file, say)
    end = time.monotonic() + STOP_WITHIN
    while True:
        try:
            state.lock()
        except Locked as locked:
            if time.monotonic() > end:
                raise Impossible(f"it was told to end and has not after {STOP_WITHIN:g} s: {locked}") from locked
            time.sleep(POLL)
        else:
            state.close()
            return


def _asked(file: File, path: str) -> bytes:
    try:
        return file.asking.ask("GET", path)
    except NoSidecar as nobody:
        hint = f"start one: sidecar serve --config {file.path}"
        with contextlib.suppress(OSError):
            hint += _left(file)
        raise Impossible(f"{nobody}; {hint}") from nobody
    except Rejected as said:
        raise Impossible(str(said)) from said


def _left(file: File) -> str:
    """A word on engines that may go on without a sidecar."""
    names = ", ".join(StateFile(file.folder / file.config.state_file, say).load().engines)
    return f" (engines it has left may still run: {names})" if names else ""
