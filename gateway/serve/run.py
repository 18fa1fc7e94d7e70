"""Process of one gateway: builds every object once, runs the background tasks, drains on SIGTERM.

Start: embedded engines, engine clients, core, telemetry, data port, control port. End, in this order: `/readyz` fails;
after `timeouts.drain_grace` new connections and what waits are refused; what streams finishes within `timeouts.drain`;
the rest is told so; then telemetry, clients and embedded engines go. A second signal cuts it short.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import random
import signal
import ssl
import sys
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import msgspec
import uvloop

from gateway.control.app import control_app
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.decider.call_log import CallLog
from gateway.decider.loading import Configuration, LoadError, load
from gateway.relay.wire.server import Server
from gateway.serve.assembly import ApplyError, Gateway
from gateway.serve.descriptors import raised, shared_out, warning
from gateway.serve.embedded import READY_WITHIN, Embedded, EmbeddedFleet
from gateway.serve.embedded_sidecar import MODELS, EmbeddedSidecar
from gateway.serve.own_token import OwnToken
from gateway.serve.sidecar_process import SidecarProcess
from gateway.shared.addresses import reachable
from gateway.shared.certificate import Certificate
from gateway.shared.control.listener import ControlPort
from gateway.shared.files.checked import InvalidFile
from gateway.shared.files.file_status import FileStatus
from gateway.shared.files.watched_file import WatchedFile
from gateway.shared.lines import LineWriter, standard_error
from gateway.shared.printable import printable
from gateway.shared.service_manager import ServiceManager


class Running(msgspec.Struct, frozen=True):
    """Where the gateway listens, for a person or a test to read."""

    data: list[str]
    control: str
    engines: list[str]
    models: list[str]
    sidecar: Path | None = None  # the file of one of our own
    in_turn: tuple[str, ...] = ()  # the demo's models


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for. `log`: a file, `-` for standard error, `none`."""

    announce: Callable[[Running], None]  # called once everything listens
    policy: Path | None = None
    shadow: Path | None = None  # a policy to compare with, never enforced
    engines: tuple[EngineEntry, ...] = ()
    embedded: tuple[EmbeddedFleet, ...] = ()
    demo: bool = False  # a sidecar of our own, with simulated GPUs
    sidecar: Path | None = None  # the file of one of our own, with this machine's
    listen: str = "127.0.0.1:8000"
    control: str = "127.0.0.1:8001"
    certificate: Certificate | None = None  # of the data port; None: plain HTTP
    control_certificate: Certificate | None = None  # of the control port; None: plain HTTP
    admin_token: str | None = None
    log: str = "-"


SWITCH = 0.0005  # seconds that a thread which parses may keep the event loop waiting for the interpreter
POLL = 0.02  # seconds between two looks whether the embedded sidecar has reported
SIDECAR_ENDS_WITHIN = 120.0  # seconds for calls and then for engines to end
NO_ENGINE = (
    "no engine: give --engine URL, --engine sim, --sidecar FILE, or fleet.engines or fleet.sidecars in the policy"
)


class StartError(Exception):
    """The gateway cannot start; the message says what to change."""


def run(options: Options) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartError."""
    sys.setswitchinterval(SWITCH)
    with standard_error() as errors:
        uvloop.run(serve(options, raised(), errors))


async def serve(options: Options, open_files: int, errors: LineWriter) -> None:
    """The whole life of a gateway process, from first object to last. `open_files`: how many it may have; `errors`
    writes to standard error."""
    async with AsyncExitStack() as stack:
        signals = ProcessSignals(asyncio.get_running_loop())
        stack.callback(signals.close)
        manager = stack.enter_context(ServiceManager())
        beside = None if options.demo else options.sidecar or options.policy
        own_token = OwnToken(beside, _say, own=options.demo or options.sidecar is not None)
        file, configuration = _configuration(options.policy, complete=own_token.complete)
        shadow_file, shadow = _configuration(options.shadow, "shadow ")
        shadow_policy = None if shadow_file is None else shadow.policy
        entries = list(options.engines)
        if options.embedded:
            embedded = Embedded()
            stack.push_async_callback(embedded.stop)
            for group in options.embedded:
                entries += [EngineEntry(url=url) for url in await _embedded(embedded, group)]
        rng = random.Random()  # noqa: S311 # jitter and tie-breaking, no secrets
        try:
            log = _call_log(options.log, errors)
            gateway = Gateway(
                configuration.policy,
                entries,
                log,
                rng,
                configuration.api_keys,
                shadow_policy,
                configuration.sidecar_token,
                configuration.cache_secret,
                _say,
                shared_out(open_files).clients,
                parser=stack.enter_context(ThreadPoolExecutor(1, "parser")),
                lost_lines=partial(_lost_lines, errors, log),
                order_token=configuration.order_token,
                sidecar_trust=configuration.sidecar_trust,
                policy_status=FileStatus if file is None else lambda: file.status,
            )
        except ApplyError as error:
            raise StartError(str(error)) from error
        stack.push_async_callback(gateway.aclose)
        _warn(open_files, configuration.policy)
        if file is not None:
            file.start(gateway.apply)
            stack.push_async_callback(file.aclose)
        if shadow_file is not None:
            shadow_file.start(gateway.apply_shadow)
            stack.push_async_callback(shadow_file.aclose)
        secure, context = _certificate("--tls-", options.certificate, stack, gateway.server.go_by)
        of_control, control_context = _certificate("--control-tls-", options.control_certificate, stack)
        signals.on_hangup(partial(_reload, (file, shadow_file, secure, of_control), log))
        app = control_app(
            gateway.fleet,
            gateway.dispatch,
            gateway.metrics.exposition,
            options.admin_token,
            gateway.clock,
            outcomes=gateway.metrics.outcomes,
            calls=gateway.calls,
            drain=partial(_drained_by_hand, gateway, signals),
            drain_engine=gateway.drain_engine,
            is_user_key=gateway.is_user_key,
            sidecars=gateway.sidecars,
            policy_status=FileStatus if file is None else lambda: file.status,
            reload=None if file is None else file.reload_now,
        )
        control = ControlPort(app, options.control, shared_out(open_files).control, control_context)
        stack.push_async_callback(control.aclose)
        gateway.telemetry.start()  # first: a call that comes now waits until its model's engines are known
        await _listening(f"--listen {options.listen}", _listen(gateway.server, options, context))
        await _listening(f"--control {options.control}", control.start())
        await gateway.telemetry.first_contact()
        sidecar = _own_sidecar(options, control.address, configuration.sidecar_token or "")
        if sidecar is not None:
            stack.push_async_callback(sidecar.stop)
            await _reporting(sidecar, control.address, gateway)
        _freeze()
        running = _running(gateway, control.address, sidecar, options)
        options.announce(running)
        manager.ready(f"data port {', '.join(running.data)}, control port {running.control}")
        await signals.first.wait()
        manager.stopping()
        await _drain(gateway, signals)


def _running(
    gateway: Gateway, control: str, sidecar: EmbeddedSidecar | SidecarProcess | None, options: Options
) -> Running:
    urls, models = [engine.url for engine in gateway.fleet], sorted(gateway.fleet.models)
    file, in_turn = None if sidecar is None else sidecar.config, MODELS if options.demo else ()
    return Running(gateway.server.addresses, control, urls, models, file, in_turn)


def _warn(open_files: int, policy: Policy) -> None:
    few = warning(open_files, policy.server.max_connections)
    if few is not None:
        _say(few)


def _drained_by_hand(gateway: Gateway, signals: ProcessSignals, wanted: bool) -> None:
    """An operator's drain, which the end of the process overrules."""
    gateway.dispatch.leaving = wanted or signals.first.is_set()


async def _drain(gateway: Gateway, signals: ProcessSignals) -> None:
    """From the first signal on: let in-flight answers finish, for as long as the policy or a second signal allows."""
    dispatch, server, timeouts = gateway.dispatch, gateway.server, gateway.policy.timeouts
    dispatch.leaving = True
    await signals.hurried(timeouts.drain_grace)
    # The server first: whoever is refused now is also told that the connection ends.
    drained = asyncio.ensure_future(server.drain(timeouts.drain))
    dispatch.refuse_waiting()
    hurried = asyncio.ensure_future(signals.second.wait())
    await asyncio.wait((drained, hurried), return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not drained.done():
        drained.cancel()
        await server.drain(0.0)


def _as_it_is(configuration: Configuration) -> Configuration:
    return configuration


def _configuration(
    path: Path | None, which: str = "", *, complete: Callable[[Configuration], Configuration] = _as_it_is
) -> tuple[WatchedFile | None, Configuration]:
    """The policy file, to be watched, and what it says now; its log lines begin with `which`. `complete` adds what it
    leaves out. Raises StartError."""
    if path is None:
        return None, complete(Configuration())
    failures = (InvalidFile, LoadError, ApplyError, OSError, ValueError)
    file = WatchedFile(
        path, lambda read: complete(load(path, read)), lambda line: _say(which + line), failures=failures
    )
    try:
        return file, file.first()
    except OSError as error:
        raise StartError(f"{error.filename}: {error.strerror}") from error
    except (InvalidFile, ValueError) as error:
        raise StartError(str(error)) from error


def _reload(files: Sequence[WatchedFile | None], log: CallLog | None) -> None:
    """Read those that are there now, changed or not, and open the log anew if it was moved."""
    for file in files:
        if file is not None:
            file.ask()
    if log is not None:
        log.lines.look()


def _lost_lines(errors: LineWriter, log: CallLog | None) -> int:
    return errors.lost + (log.lines.lost if log is not None and log.lines is not errors else 0)


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)  # some of it is what engines say


class ProcessSignals:
    """SIGTERM and SIGINT as two events: the first asks for a drain, the second ends it. SIGHUP asks for a reload."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self._loop = loop
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._arrived)
        self.on_hangup(lambda: None)  # without a policy file there is nothing to reload, and no reason to end either

    def on_hangup(self, ask: Callable[[], None]) -> None:
        self._loop.add_signal_handler(signal.SIGHUP, ask)

    def _arrived(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    async def hurried(self, within: float) -> None:
        """Until the second signal, or for `within` seconds."""
        try:
            await asyncio.wait_for(self.second.wait(), within)
        except TimeoutError:
            return

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.remove_signal_handler(number)


async def _embedded(embedded: Embedded, group: EmbeddedFleet) -> list[str]:
    try:
        return await embedded.start(group)
    except RuntimeError as error:
        raise StartError(str(error)) from error


def _own_sidecar(options: Options, control: str, token: str) -> EmbeddedSidecar | SidecarProcess | None:
    """The sidecar that this process runs, if any."""
    if options.sidecar is not None:
        return SidecarProcess(options.sidecar, "--gateway", reachable(control), stop_within=SIDECAR_ENDS_WITHIN)
    return EmbeddedSidecar(control, token) if options.demo else None


async def _reporting(sidecar: EmbeddedSidecar | SidecarProcess, control: str, gateway: Gateway) -> None:
    """Back when it has started and its models can be asked for. Raises StartError."""
    try:
        await sidecar.start()
        async with asyncio.timeout(READY_WITHIN):
            while not gateway.fleet.expected:  # noqa: ASYNC110 # once, at the start; the fleet has no event for it
                await asyncio.sleep(POLL)
    except TimeoutError:
        message = f"the sidecar of {sidecar.config} has not reported to {control} within {READY_WITHIN:g} s"
        raise StartError(f"{message}: is its token_file that of the policy's fleet.sidecars?") from None
    except (RuntimeError, ValueError) as error:
        raise StartError(str(error)) from error


def _call_log(where: str, errors: LineWriter) -> CallLog | None:
    if where == "none":
        return None
    if where == "-":
        return CallLog(errors)
    try:
        return CallLog(LineWriter.at(Path(where), _say))
    except OSError as error:
        raise StartError(f"--log: {error}") from error


def _certificate(
    flag: str,
    certificate: Certificate | None,
    stack: AsyncExitStack,
    apply: Callable[[ssl.SSLContext], None] | None = None,
) -> tuple[WatchedFile | None, ssl.SSLContext | None]:
    """The certificate's files, watched until the stack ends, and the context of what they hold. `apply` takes a newer
    one; None: the first context is renewed. Raises StartError, which names the flags that begin with `flag`."""
    if certificate is None:
        return None, None
    watched = WatchedFile(certificate.chain, certificate.context, _say, name=flag.strip("-"))
    flags = f"{flag}cert, {flag}key" + (f", {flag}client-ca" if certificate.client_ca else "")
    try:
        context = watched.first()
    except OSError as error:
        raise StartError(f"{flags}: {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise StartError(f"{flags}: {error}") from error
    watched.start(apply or partial(certificate.renew, context))
    stack.push_async_callback(watched.aclose)
    return watched, context


async def _listening(flag: str, start: Awaitable[None]) -> None:
    """Begin to listen. Raises StartError, which names the flag."""
    try:
        await start
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        hint = (
            "; another process listens there: end it, or give another port" if error.errno == errno.EADDRINUSE else ""
        )
        raise StartError(f"{flag}: {why}{hint}") from error


async def _listen(server: Server, options: Options, context: ssl.SSLContext | None) -> None:
    if options.listen.startswith("unix:"):
        await server.listen(None, None, path=options.listen.removeprefix("unix:"), ssl=context)
    else:
        host, _, port = options.listen.rpartition(":")
        await server.listen(host.strip("[]"), int(port), ssl=context)


def _freeze() -> None:
    """What lives as long as the process is not worth scanning: fewer and shorter garbage collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
