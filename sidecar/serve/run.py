"""Life of a sidecar's process (`sidecar serve`): builds every object, runs the manager, ends with or without engines.

Start: GPUs, the lock on the state file, the control API's socket, the manager (which adopts running engines), reports.
End: orders are refused; engines go on, or end while gateways are still told; a last report; the control API goes last.
A second signal cuts the ending of engines short.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

import msgspec
import uvloop

from gateway.shared.command_line import Mistake
from gateway.shared.control.http1 import ControlPort
from gateway.shared.files.checked import InvalidFile
from gateway.shared.files.file_status import FileStatus
from gateway.shared.lines import standard_error
from gateway.shared.operator_log import as_text
from gateway.shared.service_manager import ServiceManager
from gateway.shared.tokens import AcceptedTokens
from sidecar import __version__
from sidecar.control.api import Api, control_app
from sidecar.control.named_files import unwise_files
from sidecar.core.config import RelaySettings, SidecarConfig, warnings
from sidecar.core.gpus import GPUError, GPUs, Unselectable
from sidecar.core.status import Status
from sidecar.gpus.monitor import Sampler
from sidecar.relay.relay import Relay
from sidecar.reporting.gateway_link import Reporting
from sidecar.reporting.reporter import Reporter
from sidecar.residency.manager import Manager
from sidecar.residency.state_file import StateFile, own_state
from sidecar.serve.assembly import FileReload, Secrets, gpus_of, managed, relay_of, sidecar_id
from sidecar.serve.operator_log import say

DRAIN_WITHIN = 30.0  # seconds for calls to end, where engines or the relay end with the sidecar
LEFT_WITHIN = 5.0  # seconds for gateways to leave the relay after that
CLOSE_WITHIN = 60.0  # seconds for all engines to end

T = TypeVar("T")


class StartError(Exception):
    """The sidecar cannot start; the message says what to change."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the command line. `file` is where `config` was read, with `gateway` beside its gateways, and
    `secrets` in the files that it names; `gpus_from`: a folder that simulates GPUs. Where standard input ends, so
    does a sidecar that is to `end_with_parent`. One that is to `end_engines` ends them with it always."""

    announce: Callable[[Status], None]  # called once everything listens
    file: Path
    config: SidecarConfig
    gateway: str | None = None
    secrets: Secrets = Secrets()
    gpus_from: Path | None = None
    end_engines: bool = False
    end_with_parent: bool = False
    log_format: str | None = None  # json, text; None: text on a terminal, else json


def run(options: Options) -> None:
    """Serve until SIGTERM, SIGINT, or an order to stop. Raises StartError, Locked."""
    with standard_error(text=as_text(options.log_format)):
        uvloop.run(serve(options))


async def serve(options: Options) -> None:
    """The whole life of a sidecar's process, from first object to last."""
    config, folder = options.config, options.file.absolute().parent  # engines outlive our working folder
    async with AsyncExitStack() as stack:
        service = stack.enter_context(ServiceManager())
        ending = Shutdown(asyncio.get_running_loop(), options)
        stack.callback(ending.close)
        gpus = gpus_of(config, options.gpus_from)
        sampler = Sampler(gpus)
        await selected(sampler)
        state = StateFile(folder / config.state_file, say)
        state.lock()
        stack.callback(state.close)
        known = own_state(state.load(), state.path, say)
        manager = managed(config, folder, sampler, known, state, options.gpus_from)
        await manager.open()
        view = StatusView(manager, state, gpus, options)
        try:
            file = view.file = FileReload(options.file, config, options.gateway, manager, view.go_by)
        except (InvalidFile, Mistake, OSError) as error:  # it has changed since the command line was read
            raise StartError(str(error)) from error
        api = Api(manager=manager, view=view.status, end=ending.ask, leaving=ending.first.is_set)
        port = ControlPort(control_app(api, view.accepted), str(config.listen), log="weir.sidecar")
        try:
            view.relay, relayed = await listeners(port, options, manager, view.accepted, ending.first.is_set, stack)
        except StartError:
            await manager.close(end_engines=False)
            await state.flush()
            raise
        view.control, listen = port.address, msgspec.structs.replace(config.listen, port=port.port)
        settings = Reporting(
            sidecar=sidecar_id(config), boot=view.boot, listen=listen, relay=relayed,
            say=say, token=next(iter(options.secrets.tokens.report), None), ca=options.secrets.ca,
        )  # fmt: skip
        view.reporter = Reporter(manager, config.gateways, settings)
        stack.push_async_callback(view.reporter.aclose)
        view.reporter.start()
        for line in (*warnings(config), *unwise_files(config, options.file)):
            say(line)
        running = asyncio.get_running_loop().create_task(manager.run())
        file.start()
        stack.push_async_callback(file.aclose)
        ending.on_hangup(file.ask)
        options.announce(view.status())
        service.ready(f"control API {view.control}")
        await ending.or_done(running)
        service.stopping()
        await file.aclose()
        await end(manager, running, view.reporter, view.relay, ending, options.file)
        await state.flush()


async def selected(sampler: Sampler) -> None:
    """Find the GPUs that the file selects. Raises StartError; GPUs that cannot be read are looked at again."""
    try:
        with contextlib.suppress(GPUError):
            await sampler.sample()
    except Unselectable as error:
        raise StartError(f"gpus: {error}") from error


class StatusView:
    """View of the sidecar for `/status`. `control`, `reporter`, `relay` and `file` are set once they are there."""

    def __init__(self, manager: Manager, state: StateFile, gpus: GPUs, options: Options) -> None:
        self.control = ""
        self.reporter: Reporter | None = None
        self.relay: Relay | None = None
        self.file: FileReload | None = None
        self._manager = manager
        self.state = state
        self._gpus = gpus
        self._options = options
        self.boot = secrets.token_hex(8)  # another one after each start
        self.accepted = AcceptedTokens(options.secrets.tokens.order)
        self._began = time.monotonic()

    def go_by(self, found: Secrets) -> None:
        """Accept and show these tokens from now on, and trust these authorities."""
        self.accepted.renew(found.tokens.order)
        if self.reporter is not None:
            self.reporter.go_by(next(iter(found.tokens.report), None), found.ca)

    def status(self) -> Status:
        """Return the current status."""
        manager, config, file = self._manager, self._options.config, self.file
        bad_state = f"the state file cannot be written: {self.state.error}" if self.state.error else ""
        return Status(
            sidecar=sidecar_id(config),
            version=__version__,
            pid=os.getpid(),
            boot=self.boot,
            config=str(self._options.file.absolute()),
            control=self.control,
            up_s=time.monotonic() - self._began,
            driver=self._gpus.driver,
            gpus=manager.gpus(),
            models=manager.models(),
            gateways=() if self.reporter is None else self.reporter.gateways(),
            calls={profile: manager.requests_active(profile) for profile in manager.entries},
            file=FileStatus() if file is None else file.status,
            state_error=self.state.error,
            relay=None if self.relay is None else self.relay.use,
            troubles=tuple(filter(None, (*manager.troubles(), bad_state, "" if file is None else file.trouble))),
        )


async def listeners(
    port: ControlPort,
    options: Options,
    manager: Manager,
    tokens: AcceptedTokens,
    leaving: Callable[[], bool],
    stack: AsyncExitStack,
) -> tuple[Relay | None, RelaySettings | None]:
    """Have the control API listen and, if the file has one, the relay: it, and the settings that it listens by. The
    stack ends them. Raises StartError."""
    settings = options.config.relay
    stack.push_async_callback(port.aclose)
    await listening(f"listen {options.config.listen}", port.start())
    if settings is None:
        return None, None
    relay = relay_of(manager, tokens, leaving)
    stack.push_async_callback(relay.aclose)
    start = relay.start(settings, options.file.absolute().parent)
    return relay, await listening(f"relay {settings.listen}", start)


async def listening(field: str, start: Awaitable[T]) -> T:
    """Begin to listen where a field says. Raises StartError, which names it."""
    try:
        return await start
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise StartError(f"{field}: {error.filename + ': ' if error.filename else ''}{why}") from error
    except ValueError as error:
        raise StartError(f"{field}: {error}") from error


async def end(
    manager: Manager,
    running: asyncio.Task[None],
    reporter: Reporter,
    relay: Relay | None,
    ending: Shutdown,
    file: Path,
) -> None:
    """End the manager, its engines too if they are to, once their calls have ended; a second signal hurries. Where
    engines go on, calls through the relay may end first: they cannot outlive the sidecar."""
    models = [model for model in manager.models() if model.state in ("running", "sleeping")]
    if ending.engines and models:
        say(f"ending with {len(models)} engine{'s' * (len(models) != 1)}; a second signal kills them at once")
        if ending.patient:
            await ending.unless_hurried(asyncio.ensure_future(reporter.withdraw(DRAIN_WITHIN)), DRAIN_WITHIN)
    elif relay is not None and ending.patient:
        await ending.unless_hurried(asyncio.ensure_future(relay.aclose(DRAIN_WITHIN)), DRAIN_WITHIN + LEFT_WITHIN)
    running.cancel()
    await asyncio.wait((running,))
    closing = asyncio.ensure_future(manager.close(end_engines=ending.engines))
    await ending.unless_hurried(closing, CLOSE_WITHIN)
    if not ending.engines and models:
        names = ", ".join(f"{model.profile} ({model.url})" for model in models)
        say(f"the sidecar has ended; its engines go on: {names}")
        say(f"the next `sidecar serve --config {file}` takes them over; `sidecar stop --all --config {file}` ends them")
    failed = [task for task in (closing, running) if not task.cancelled() and task.exception() is not None]
    for task in failed:
        await task  # a bug: its traceback is the process's


class Shutdown:
    """Shutdown, on SIGTERM, SIGINT, an order, the end of standard input. `engines`: they end with it, once
    their calls have, if it is `patient`; whoever started it for itself alone has no calls when it is gone."""

    def __init__(self, loop: asyncio.AbstractEventLoop, options: Options) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.engines = False
        self.patient = True
        self._loop = loop
        self._end_engines = options.end_engines
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask, options.end_engines)
        self.on_hangup(lambda: None)  # a terminal that closes ends neither the sidecar nor the engines
        if options.end_with_parent:
            threading.Thread(target=self._watch_parent, name="parent", daemon=True).start()

    def ask(self, engines: bool) -> None:
        """Begin the end; whoever asks again hurries it."""
        if self.first.is_set():
            self.second.set()
        else:
            self.engines = engines
            self.first.set()

    def on_hangup(self, call: Callable[[], None]) -> None:
        """Call this on SIGHUP from now on."""
        self._loop.add_signal_handler(signal.SIGHUP, call)

    async def unless_hurried(self, work: asyncio.Future[None], within: float) -> None:
        """Wait for `work`, and cancel it after `within` seconds or when somebody hurries."""
        hurried = asyncio.ensure_future(self.second.wait())
        await asyncio.wait((work, hurried), timeout=within, return_when=asyncio.FIRST_COMPLETED)
        for task in (work, hurried):
            task.cancel()
        await asyncio.wait((work, hurried))

    async def or_done(self, running: asyncio.Task[None]) -> None:
        """Until somebody asks, or what should run for ever has failed."""
        asked = asyncio.ensure_future(self.first.wait())
        await asyncio.wait((asked, running), return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()

    def close(self) -> None:
        """Give the signals back to their defaults."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.remove_signal_handler(number)

    def _orphaned(self) -> None:
        self.patient = not self._end_engines
        self.ask(self._end_engines)

    def _watch_parent(self) -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._orphaned)
