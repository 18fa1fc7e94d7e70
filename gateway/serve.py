"""Builds every object once, runs the background tasks, drains on SIGTERM.

Start: embedded engines, engine clients, core, data port, control port, telemetry. End, in this order: `/readyz` fails;
after `timeouts.drain_grace` new connections and what waits are refused; what streams finishes within `timeouts.drain`;
the rest is told so; then telemetry, clients and embedded engines go. A second signal cuts it short.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import resource
import signal
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import uvloop

from gateway.calllog import CallLog
from gateway.control.app import control_app
from gateway.control.listener import ControlPort
from gateway.core.call import CallSettings
from gateway.core.cost import CostModel
from gateway.core.fleet import Engine, Fleet
from gateway.core.outcome import Record
from gateway.core.policy import EngineEntry, Policy
from gateway.core.retries import RetryBudget
from gateway.dispatch import Dispatch
from gateway.embedded import Embedded, EmbeddedFleet
from gateway.metrics import Metrics
from gateway.pipeline import Pipeline
from gateway.telemetry import Telemetry
from gateway.wire.client import Client, ClientSettings, parse_origin
from gateway.wire.server import Server, ServerSettings


class Running(msgspec.Struct, frozen=True):
    """Where the gateway listens, for a person or a test to read."""

    data: list[str]
    control: str
    engines: list[str]
    models: list[str]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for. `log`: a file, `-` for standard error, `none`."""

    announce: Callable[[Running], None]  # called once everything listens
    policy: Policy = Policy()
    engines: tuple[EngineEntry, ...] = ()
    embedded: tuple[EmbeddedFleet, ...] = ()
    listen: str = "127.0.0.1:8000"
    control: str = "127.0.0.1:8001"
    tls_cert: str | None = None
    tls_key: str | None = None
    admin_token: str | None = None
    log: str = "-"


class StartError(Exception):
    """The gateway cannot start; the message says what to change."""


def run(options: Options) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartError."""
    _allow_open_files()
    uvloop.run(serve(options))


class Gateway:
    """Every object of one gateway, built once: what `serve` runs, and what a test or a simulation drives."""

    def __init__(self, policy: Policy, entries: list[EngineEntry], log: CallLog | None, rng: random.Random) -> None:
        self.policy = policy
        self.log = log
        self.rng = rng
        self.clock = asyncio.get_running_loop().time
        self.fleet = Fleet()
        self.clients: dict[str, Client] = {}
        self.api_keys: dict[str, str] = {}
        for entry in entries:
            self._add(entry)
        self.dispatch = Dispatch(self.fleet, policy, rng, self.clock)
        self.pipeline = Pipeline(
            policy,
            call_settings(policy),
            self.fleet,
            self.dispatch,
            CostModel(policy.budget.alpha),
            RetryBudget(policy.retries),
            self.clients,
            self.observe,
            self.clock,
            rng,
        )
        self.server = Server(self.pipeline, server_settings(policy))
        self.metrics = Metrics(self.fleet, self.dispatch, lambda: self.server.connections, lambda: self.server.refusals)

    def _add(self, entry: EngineEntry) -> None:
        engine = Engine(
            engine_id(entry.url),
            entry.url,
            self.policy,
            capacity=entry.capacity,
            max_concurrency=entry.max_concurrency,
            models=entry.models,
        )
        key = _api_key(entry)
        if key is not None:
            self.api_keys[engine.id] = key
        timeouts = self.policy.timeouts
        settings = ClientSettings(connect_timeout=timeouts.connect, stall_timeout=timeouts.stall)
        self.fleet.add(engine)
        self.clients[engine.id] = Client(parse_origin(entry.url), settings, api_key=key)

    def observe(self, record: Record) -> None:
        """The end of every call: counted, and logged by the policy's share."""
        self.metrics.observe(record)
        share = self.policy.logging.calls
        if self.log is not None and (share >= 1 or self.rng.random() < share):
            self.log.write(record, self.clock())

    async def aclose(self) -> None:
        for client in self.clients.values():
            await client.aclose()
        if self.log is not None:
            await self.log.aclose()


async def serve(options: Options) -> None:
    """The whole life of a gateway process, from first object to last."""
    async with AsyncExitStack() as stack:
        signals = Signals(asyncio.get_running_loop())
        stack.callback(signals.close)
        policy = options.policy
        entries = [*policy.fleet.engines, *options.engines]
        if options.embedded:
            embedded = Embedded()
            stack.push_async_callback(embedded.stop)
            for group in options.embedded:
                entries += [EngineEntry(url=url) for url in await _embedded(embedded, group)]

        rng = random.Random()  # noqa: S311 # jitter and tie-breaking, no secrets
        gateway = Gateway(policy, entries, _call_log(options.log), rng)
        stack.push_async_callback(gateway.aclose)
        fleet, dispatch, server = gateway.fleet, gateway.dispatch, gateway.server
        telemetry = Telemetry(fleet, policy, dispatch.pump, gateway.clock, gateway.api_keys)
        stack.push_async_callback(telemetry.aclose)
        app = control_app(fleet, dispatch, gateway.metrics.exposition, options.admin_token, gateway.clock)
        control = ControlPort(app, options.control)
        stack.push_async_callback(control.aclose)
        try:
            await _listen(server, options)
            await control.start()
        except OSError as error:
            raise StartError(f"cannot listen: {error}") from error
        telemetry.start()
        await telemetry.first_contact()
        _freeze()
        urls = [engine.url for engine in fleet]
        options.announce(Running(server.addresses, control.address, urls, sorted(fleet.models)))

        await signals.first.wait()
        dispatch.leaving = True
        await signals.hurried(policy.timeouts.drain_grace)
        # The server first: whoever is refused now is also told that the connection ends.
        drained = asyncio.ensure_future(server.drain(policy.timeouts.drain))
        dispatch.refuse_waiting()
        hurried = asyncio.ensure_future(signals.second.wait())
        await asyncio.wait((drained, hurried), return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not drained.done():
            drained.cancel()
            await server.drain(0.0)


class Signals:
    """SIGTERM and SIGINT as two events: the first asks for a drain, the second ends it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self._loop = loop
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._arrived)

    def _arrived(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    async def hurried(self, within: float) -> None:
        """Until the second signal, or for `within` seconds."""
        try:
            await asyncio.wait_for(self.second.wait(), within)
        except TimeoutError:
            return

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)


async def _embedded(embedded: Embedded, group: EmbeddedFleet) -> list[str]:
    try:
        return await embedded.start(group)
    except RuntimeError as error:
        raise StartError(str(error)) from error


def engine_id(url: str) -> str:
    """How metrics, logs and headers call an engine: its URL without the scheme."""
    return url.partition("://")[2].rstrip("/")


def _api_key(entry: EngineEntry) -> str | None:
    if entry.api_key_file is None:
        return None
    try:
        return Path(entry.api_key_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"api_key_file of {entry.url}: {error}") from error


def _call_log(where: str) -> CallLog | None:
    if where == "none":
        return None
    if where == "-":
        return CallLog(2)
    try:
        return CallLog(os.open(where, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640))
    except OSError as error:
        raise StartError(f"--log: {error}") from error


async def _listen(server: Server, options: Options) -> None:
    context = None
    if options.tls_cert:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(options.tls_cert, options.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise StartError(f"--tls-cert, --tls-key: {error}") from error
    if options.listen.startswith("unix:"):
        await server.listen(None, None, path=options.listen.removeprefix("unix:"), ssl=context)
    else:
        host, _, port = options.listen.rpartition(":")
        await server.listen(host.strip("[]"), int(port), ssl=context)


def _allow_open_files() -> None:
    """Every connection is an open file, and the usual soft limit of 1,024 is there for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _freeze() -> None:
    """What lives as long as the process is not worth scanning: fewer and shorter garbage collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def call_settings(policy: Policy) -> CallSettings:
    """What the parser needs of the policy."""
    names = list(policy.classes)
    return CallSettings(
        class_deadlines={name: traffic_class.deadline for name, traffic_class in policy.classes.items()},
        default_class="default" if "default" in policy.classes else names[0],
        service_tiers=dict(policy.service_tiers),
        max_messages=policy.body.max_messages,
        max_n=policy.body.max_n,
        media=policy.body.media,
        block=policy.routing.block,
    )


def server_settings(policy: Policy) -> ServerSettings:
    """What the data port needs of the policy."""
    return ServerSettings(
        max_connections=policy.server.max_connections,
        max_request_line=policy.server.max_request_line,
        max_headers=policy.server.max_headers,
        max_header_fields=policy.server.max_header_fields,
        max_pipelined=policy.server.max_pipelined,
        write_high_water=policy.server.write_high_water,
        headers_timeout=policy.timeouts.headers,
        body_timeout=policy.timeouts.body,
        keep_alive=policy.timeouts.keep_alive,
        max_body=policy.body.max,
        write_stall=policy.timeouts.write_stall,
        half_open_timeout=policy.timeouts.half_open,
    )
