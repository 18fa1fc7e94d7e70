"""`sidecar stop`: the end of one model's engine; or of the sidecar, and of its engines where asked."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time

import msgspec

from gateway.shared.command_line import Impossible, Mistake
from sidecar.cli import orders
from sidecar.cli.files import File
from sidecar.control.api import Stopping
from sidecar.control.client import NoSidecar, Rejected
from sidecar.core.engine_records import EngineFailed, EngineRecord
from sidecar.process.engine import VllmEngines
from sidecar.residency.state_file import Locked, SavedState, StateError, own_state
from sidecar.serve.assembly import engines_of
from sidecar.serve.operator_log import say

STOP_WITHIN = 120.0  # seconds for a sidecar to end, with its engines
POLL = 0.05  # seconds between two looks whether it has

DESCRIPTION = "End a model's engine, or the sidecar."
EXAMPLES = f"""\
With MODEL: gateways send it nothing more, and its engine ends when its calls have; those that still run after 60 s are
cut off. The next call starts it again, a pinned one too: `sidecar off MODEL` is for good.

Without: ends the sidecar and waits for that. Its engines go on, and the next `sidecar serve` takes them over; with
--all they are ended too, also where the sidecar has ended already.

{orders.STATUSES}

examples:
  sidecar stop llama-3-8b                        its engine; the memory is free afterwards
  sidecar stop                                   the sidecar
  sidecar stop --all                             the sidecar and its engines"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    orders.add_arguments(parser, optional=True)
    parser.add_argument("--all", action="store_true", help="the sidecar and its engines")


def command(given: argparse.Namespace) -> int:
    """End a model's engine; or the sidecar, and its engines if they are to. Raises Mistake, Impossible."""
    if given.model is not None and given.all:
        raise Mistake("--all is for the sidecar and all its engines: it takes no MODEL")
    if given.model is not None:
        return orders.carried_out(given, "stop")
    if given.timeout != orders.TIMEOUT:
        raise Mistake("--timeout is for `sidecar stop MODEL`")
    file = File(given.config)
    was_there = True
    try:
        answer = file.client.ask("POST", "/stop", {"engines": given.all})
        running = ", ".join(msgspec.json.decode(answer, type=Stopping).running)
    except (Rejected, msgspec.MsgspecError) as error:
        raise Impossible(str(error)) from error
    except NoSidecar as nobody:
        if not given.all:
            print(f"sidecar: {nobody}: nothing to stop (--all ends engines that one has left)", file=sys.stderr)
            return 0
        was_there = False
    else:
        _wait(file)
        left = f"; engines that go on: {running}" if running else "; no engine was running"
        print(f"the sidecar has ended{f' with its engines: {running}' if running and given.all else left}")
        if not given.all:
            return 0
    try:
        ended = asyncio.run(_ended(file))
    except Locked as locked:
        raise Impossible(f"{locked}; it does not answer at {file.client.address}: end it by its number") from locked
    if ended or not was_there:
        print(f"ended {', '.join(ended)}" if ended else "no engine was running")
    return 0


def _wait(file: File) -> None:
    """Until the sidecar has given its state file back, which is the last it does. Raises Impossible."""
    state = file.state()
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


async def _ended(file: File) -> list[str]:
    """End every engine that an earlier sidecar with this file has left running, and say which those were. Raises Locked
    where a sidecar runs after all."""
    state = file.state()
    state.lock()
    try:
        try:
            known = own_state(state.read(), state.path, say)
        except (OSError, StateError) as error:  # as of another user, whose next sidecar needs it
            say(f"{state.path} is left as it is: {error}")
            known = SavedState()
        engines = engines_of(file.config, file.folder)
        stopped = await asyncio.gather(*(_stop(engines, name, record) for name, record in known.engines.items()))
        await engines.sweep(())  # what could not be taken over, and what the state file does not know
        if known.engines:
            state.save(msgspec.structs.replace(known, engines={}))
            await state.flush()
    finally:
        state.close()
    return [name for name, was_there in zip(known.engines, stopped, strict=True) if was_there]


async def _stop(engines: VllmEngines, name: str, record: EngineRecord) -> bool:
    """Let it end as it would of itself; False: there was none, or it is left to the sweep."""
    with contextlib.suppress(EngineFailed, KeyError):
        engine = await engines.adopt(name, record)
        await engine.stop()
        return True
    return False
