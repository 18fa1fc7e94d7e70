"""Process of one gateway: builds every object once, runs the background tasks, drains on SIGTERM.

Start: embedded engines, engine clients, core, telemetry, data port, control port. End, in this order: `/readyz` fails;
after `timeouts.drain_grace` new connections and what waits are refused; what streams finishes within `timeouts.drain`;
the rest is told so; then telemetry, clients and embedded engines go. A second signal cuts it short.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import msgspec
import uvloop

from gateway.core.history import History
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.decider.call_log import CallLog
from gateway.decider.known_models import KnownModels, file_for
from gateway.decider.loading import Configuration
from gateway.serve.assembly import Gateway, Monitoring
from gateway.serve.cluster.hashes import same_hashes
from gateway.serve.cluster.port import ClusterPort
from gateway.serve.control_parts import app_of
from gateway.serve.data_port import DataPort, MachinePort
from gateway.serve.embedded import READY_WITHIN, embedded
from gateway.serve.ending import end, listen_for_successor
from gateway.serve.policy_file import applying, configured, first_read, policy_status, reload
from gateway.serve.processes.deciding import DeciderProcess, sockets_of
from gateway.serve.processes.last_good import LastGood
from gateway.serve.processes.parent import Parent
from gateway.serve.processes.place import TOLD, Beats, Place
from gateway.serve.processes.relaying import relay
from gateway.serve.sidecar_process import MODELS, SidecarProcess, embedded_sidecar
from gateway.serve.starting import (
    ApplyError,
    Options,
    ProcessSignals,
    Running,
    StartError,
    admin_tokens_of,
    call_log,
    certificate_of,
    files_warning,
    freeze,
    lost_lines,
    raised_files,
    shared_out,
    span_export,
    try_relays,
)
from gateway.serve.stored import begun, check, offered, opened, storage_of
from gateway.serve.upgrade.next_gateway import NextGateway
from gateway.serve.upgrade.receiver import InheritedSockets, inherited
from gateway.serve.upgrade.rendezvous import rendezvous_path
from gateway.shared.addresses import reachable, split_address
from gateway.shared.certificate import Contents
from gateway.shared.control.http1 import ControlPort
from gateway.shared.lines import LineWriter, say, standard_error
from gateway.shared.notice import Notice
from gateway.shared.operator_log import as_text, plain
from gateway.shared.service_manager import ServiceManager
from gateway.shared.tasks import cancel, lasting
from gateway.shared.tokens import Tokens
from gateway.shared.watched_file import WatchedFile

SWITCH = 0.0005  # seconds that a thread which parses may keep the event loop waiting for the interpreter
POLL = 0.02  # seconds between two looks whether the embedded sidecar has reported
SIDECAR_ENDS_WITHIN = 120.0  # seconds for calls and then for engines to end
NO_ENGINE = (
    "no engine: give --engine URL, --engine sim, --sidecar FILE, or fleet.engines, fleet.sidecars or "
    "fleet.inference_pool in the policy"
)


def run(options: Options) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. Raises StartError."""
    sys.setswitchinterval(SWITCH)
    open_files = raised_files()
    configuration = None
    if options.relays:
        configuration = first_read(options.policy)[1]
        same_hashes(configuration)
    sockets = inherited(options.take_over, options.control)
    with contextlib.ExitStack() as stack:
        try:
            own = [EngineEntry(url=url) for url in stack.enter_context(embedded(options.embedded))]
        except RuntimeError as error:
            raise StartError(str(error)) from error
        options = msgspec.structs.replace(options, engines=(*options.engines, *own))
        if configuration is not None:
            return _several(options, configuration.policy, sockets)
        errors = stack.enter_context(standard_error(text=as_text(options.log_format)))
        uvloop.run(serve(options, open_files, errors, sockets))
    return 0


def _several(options: Options, policy: Policy, sockets: InheritedSockets) -> int:
    """Run as the parent of several processes. The parent opens sockets before it forks, and only holds them. `policy`:
    the policy at the start, by which relays that are started later offer batches too."""
    freeze()  # a child's collector would write to, and so copy, what all share
    with contextlib.ExitStack() as stack:
        data, control = sockets_of(options, sockets, stack)
        if sockets.taken is not None:
            try_relays(options)
        tell = plain(text=as_text(options.log_format))
        successor = NextGateway(_rendezvous(options, control.getsockname()[1]), tell)
        process = partial(_process, options, policy, LastGood(), LastGood(), LastGood())
        return Parent(options.relays, data, control, process, tell, sockets, successor).run()


def _rendezvous(options: Options, port: int) -> Path:
    return rendezvous_path(split_address(options.control)[0], port)


def _process(
    options: Options,
    policy: Policy,
    last: LastGood[Configuration],
    of_control: LastGood[Contents],
    of_data: LastGood[Contents],
    place: Place,
) -> int:
    """The life of one of several processes, and its exit status. `of_control` and `of_data`: the ports' certificates,
    as a process of before had them."""
    with standard_error(text=as_text(options.log_format)) as errors:
        try:
            if place.role == "decider":
                remembering = msgspec.structs.replace(place, last=last, certificate=of_control)
                uvloop.run(serve(options, raised_files(), errors, place.inherited, remembering))
            else:
                remembering = msgspec.structs.replace(place, certificate=of_data)
                uvloop.run(relay(options, policy, raised_files(), errors, remembering))
        except StartError as error:
            say(Notice(str(error), "start_failed", "error"))
            return 2
    return 0


async def serve(
    options: Options, open_files: int, errors: LineWriter, sockets: InheritedSockets, place: Place | None = None
) -> None:
    """Run a gateway process, from first object to last. `open_files`: how many it may have; `errors` writes to standard
    error. `sockets`: open already. `place`: it decides for relays, which have certificates of their own."""
    alone, later = place is None, place is not None and not place.first
    async with AsyncExitStack() as stack:
        signals = ProcessSignals(asyncio.get_running_loop(), child=not alone)
        stack.callback(signals.close)
        process = None if place is None else DeciderProcess(place, Beats(place.beats, signals.end))
        # Of several processes the parent speaks to the service manager, which knows no other.
        manager = stack.enter_context(ServiceManager(os.environ if alone else {}))
        history = History()
        tell = history.noting(say, time.time)
        file, configuration = configured(options, place, tell)
        # Of several processes the decider has calls to log only where a proxy forwards some.
        log = call_log(options, errors, tell, later=later) if alone or options.epp is not None else None
        spans = span_export(options.traces, stack) if alone else None
        monitoring = Monitoring(partial(lost_lines, errors, log), policy_status(options, file), spans, history)
        few = files_warning(open_files, configuration.policy.server.max_connections)
        if few is not None:
            say(few)
        clients, watchers = shared_out(open_files)
        made = partial(_gateway, options, log, tell, clients, monitoring, stack)
        gateway, configuration = _usable(made, file, configuration, place)
        port = _data_port(options, gateway, process, configuration, sockets)
        stack.push_async_callback(port.aclose)
        if file is not None:
            file.start(applying(place, port.apply, configuration))
            stack.push_async_callback(file.aclose)
        secure, context = certificate_of("--tls-", options.certificate if alone else None, stack, gateway.server.go_by)
        before = None if place is None else place.certificate
        of_control, control_context = certificate_of("--control-tls-", options.control_certificate, stack, last=before)
        admin, admin_tokens = admin_tokens_of(options, stack)
        signals.on_hangup(partial(reload, (file, secure, of_control, admin), log))
        app = app_of(options, gateway, port, signals, file, errors, log, admin_tokens)
        control = ControlPort(app, options.control, watchers, control_context)
        stack.push_async_callback(control.aclose)
        await _listen(options, gateway, port, control, context, sockets, place)
        sidecar = await _own_sidecar(options, gateway, control.address, configuration.sidecar_tokens, signals, stack)
        stack.callback(lasting("the history", partial(gateway.observer.run, port.count)).cancel)
        freeze()
        if place is None or not place.told:
            options.announce(_running(options, gateway, port, control, sidecar))
        if process is not None:
            process.beats.tell(TOLD)
        manager.ready(f"data port {', '.join(port.addresses)}, control port {control.address}")
        path = _rendezvous(options, control.port)
        sender = listen_for_successor(path, port, control, stack, signals if alone else None)
        await end(gateway, port, control, signals, sender, manager)


def _usable(
    made: Callable[[Configuration], Gateway],
    file: WatchedFile | None,
    configuration: Configuration,
    place: Place | None,
) -> tuple[Gateway, Configuration]:
    """The gateway, and the configuration that it goes by: what the file says, or what counted before where that cannot
    be used here. Raises StartError."""
    before = None if place is None else place.before
    if file is None or before is None:
        return made(configuration), configuration
    if configuration.policy.cluster == before.policy.cluster:  # else the other processes would be of another one
        with contextlib.suppress(StartError):
            return made(configuration), configuration
    file.refuse()  # so that the fault is told
    return made(before), before


def _gateway(
    options: Options,
    log: CallLog | None,
    tell: Callable[[str], None],
    most_clients: int,
    monitoring: Monitoring,
    stack: AsyncExitStack,
    configuration: Configuration,
) -> Gateway:
    """Build the gateway, which `stack` closes, with what outlasts it: names of models, and a storage, which is not
    opened yet. Raises StartError for a policy that cannot be used here."""
    try:
        gateway = Gateway(
            configuration,
            options.engines,
            log,
            random.Random(),  # noqa: S311 # jitter and tie-breaking, no secrets
            say=tell,
            most_clients=most_clients,
            parser=stack.enter_context(ThreadPoolExecutor(1, "parser")),
            monitoring=monitoring,
        )
    except ApplyError as error:
        raise StartError(str(error)) from error
    stack.push_async_callback(gateway.aclose)
    gateway.token_use.set_calendar()
    if options.policy is not None:
        gateway.sidecars.remember(KnownModels(file_for(options.policy), say))
        gateway.storage = storage_of(options.policy, gateway.policy)
    return gateway


def _data_port(
    options: Options,
    gateway: Gateway,
    process: DeciderProcess | None,
    configuration: Configuration,
    sockets: InheritedSockets,
) -> DataPort:
    """Return the data port of this machine, or of its cluster. Raises StartError."""
    if configuration.policy.cluster is None:
        return MachinePort(gateway, options, configuration, sockets, process)
    if process is None:
        raise StartError("cluster: its relays are processes of their own: give --workers 2 or more")
    if options.epp is not None:
        raise StartError("cluster: --epp is for a gateway that is alone: its holds would be of one member only")
    return ClusterPort(gateway, options, configuration, process)


async def _listen(
    options: Options,
    gateway: Gateway,
    port: DataPort,
    control: ControlPort,
    context: ssl.SSLContext | None,
    sockets: InheritedSockets,
    place: Place | None,
) -> None:
    """Begin to listen, once a gateway that is taken over has stopped. Raises StartError."""
    gateway.telemetry.start()  # first: a call that comes now waits until its model's engines are known
    if sockets.taken is not None and (place is None or place.first):
        await check(gateway.storage)
        await gateway.telemetry.first_contact()  # all that takes time, or may fail, comes first
        await port.take_over(sockets.taken)
    await opened(gateway.storage, gateway.token_use)
    if place is None:  # else relays do
        policy, storage, pipeline = gateway.policy, gateway.storage, gateway.pipeline
        gateway.batches = offered(policy, storage, pipeline, gateway.bodies, gateway.say)
        await begun(gateway.batches)
    await _listening(f"--listen {options.listen}", port.listen(context))
    bound = sockets.control if place is None else place.control
    await _listening(f"--control {options.control}", control.start(bound))
    await gateway.telemetry.first_contact()


def _running(
    options: Options, gateway: Gateway, port: DataPort, control: ControlPort, sidecar: SidecarProcess | None
) -> Running:
    urls, models = [engine.url for engine in gateway.fleet], sorted(gateway.fleet.models)
    file, in_turn = None if sidecar is None else sidecar.config, MODELS if options.demo else ()
    keyed = gateway.current.snapshot.tenants.keyed
    return Running(port.addresses, control.address, urls, models, file, in_turn, keyed)


async def _own_sidecar(
    options: Options,
    gateway: Gateway,
    control: str,
    tokens: Tokens,
    signals: ProcessSignals,
    stack: AsyncExitStack,
) -> SidecarProcess | None:
    """Start the sidecar that this process runs. None: it runs none, or a signal ends it before. Raises StartError."""
    # A sidecar writes to the same standard error, so its lines get the same format.
    log_format = () if options.log_format is None else ("--log-format", options.log_format)
    try:
        if options.sidecar is not None:
            flags = ("--gateway", reachable(control), *log_format)
            sidecar = SidecarProcess(options.sidecar, flags, SIDECAR_ENDS_WITHIN, say)
        elif options.demo:
            sidecar = stack.enter_context(embedded_sidecar(control, "".join(tokens[:1]), say, log_format))
        else:
            return None
        stack.push_async_callback(sidecar.stop)
        return sidecar if await _begun(sidecar, gateway, signals) else None
    except TimeoutError:
        message = f"the sidecar of {sidecar.config} has not reported to {control} within {READY_WITHIN:g} s"
        raise StartError(f"{message}: is its token_file that of the policy's fleet.sidecars?") from None
    except (RuntimeError, ValueError) as error:
        raise StartError(str(error)) from error


async def _begun(sidecar: SidecarProcess, gateway: Gateway, signals: ProcessSignals) -> bool:
    """Start a sidecar, and return whether that was done before a signal ends this process."""
    begun, told = asyncio.ensure_future(_reported(sidecar, gateway)), asyncio.ensure_future(signals.first.wait())
    try:
        await asyncio.wait((begun, told), return_when=asyncio.FIRST_COMPLETED)
        if begun.done():
            await begun
        return begun.done()
    finally:
        await cancel(begun, told)


async def _reported(sidecar: SidecarProcess, gateway: Gateway) -> None:
    """Start a sidecar. Back when it has reported, so its models can be asked for if they can be had at all: all may be
    off, or their GPUs be unreadable."""
    await sidecar.start()
    async with asyncio.timeout(READY_WITHIN):
        while not gateway.dispatch.sidecars.sidecars:  # noqa: ASYNC110 # once, at the start
            await asyncio.sleep(POLL)


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
