"""Process of one relay: clients' and engines' connections, and a link to whoever decides."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gateway.batches.door import BatchDoor
from gateway.core.call_counts import CallCounts
from gateway.core.engines.origin import origin_of
from gateway.core.policy.policy import Policy
from gateway.core.policy.snapshot import Current, Snapshot
from gateway.core.request.body_memory import BodyMemory
from gateway.decider.call_log import CallLog
from gateway.decider.ended_calls import EndedCalls
from gateway.decider.recorder import Recorder
from gateway.frames import messages as frames
from gateway.relay.attempts import Attempts
from gateway.relay.large_bodies import LargeBodies
from gateway.relay.pipeline import Pipeline
from gateway.relay.remote.decider import RemoteDecider
from gateway.relay.remote.link import Connect, Link
from gateway.relay.tracing import Tracing
from gateway.relay.wire.server import Server
from gateway.serve import starting
from gateway.serve.assembly import relay_counts, server_settings
from gateway.serve.fleet_engines import client_settings
from gateway.serve.processes.place import READY, Beats, Place
from gateway.serve.stored import batches_beside
from gateway.shared.lines import LineWriter, say
from gateway.shared.tasks import cancel, lasting
from gateway.shared.watched_file import WatchedFile
from gateway.upstream.client import Client
from gateway.upstream.names import Names
from gateway.upstream.trust import Trust

if TYPE_CHECKING:
    from gateway.relay.issuer import Issuer
    from gateway.serve.otlp import SpanExport

COUNT_EVERY = 1.0  # seconds


async def relay(options: starting.Options, policy: Policy, open_files: int, errors: LineWriter, place: Place) -> None:
    """The whole life of a relay. `policy`: of the gateway's start. Raises StartError."""
    place.control.close()  # nobody else could listen there while this process finishes its streams
    async with AsyncExitStack() as stack:
        signals = starting.ProcessSignals(asyncio.get_running_loop(), child=True)
        stack.callback(signals.close)
        beats = Beats(place.beats, signals.end)
        log = starting.call_log(options, errors, later=not place.first)
        parser = stack.enter_context(ThreadPoolExecutor(1, "parser"))
        most, _ = starting.shared_out(open_files)
        spans = starting.span_export(options.traces, stack)
        side = RelaySide(place, most, log, parser, partial(starting.lost_lines, errors, log), spans=spans)
        stack.push_async_callback(side.aclose)
        side.link.start()
        await side.link.ready.wait()

        async def offers() -> None:
            side.batches = await stack.enter_async_context(side.offered(options.policy, policy))

        try:
            await offers()
        except starting.StartError as error:
            if place.first:
                raise
            say(f"relay {place.number}: {error}: it takes calls, and files and batches once that is over")
            stack.push_async_callback(cancel, lasting("files and batches", offers))
        secure, context = starting.certificate_of(
            "--tls-", options.certificate, stack, side.server.go_by, place.certificate
        )
        signals.on_hangup(partial(_look, secure, log))
        for listening in place.data:
            await side.server.listen(listening, ssl=context, owner=False)
        starting.freeze()
        beats.tell(READY)
        await side.until_drained(signals)


def _look(secure: WatchedFile | None, log: CallLog | None) -> None:
    """See whether the certificate has changed, and whether the log was moved."""
    if secure is not None:
        secure.ask()
    if log is not None:
        log.lines.look()


class RelaySide:
    """All that one relay is made of. Its data port opens once the decider has told it a policy.

    A simulation gives it its own: `parser` None: large bodies are parsed here; `connect` in place of a unix socket,
    `client_of` in place of connections to an engine, `rng`, and `pid`.
    """

    def __init__(
        self,
        place: Place,
        most_clients: int,
        log: CallLog | None,
        parser: ThreadPoolExecutor | None,
        lost: Callable[[], int],
        *,
        connect: Connect | None = None,
        client_of: Callable[[frames.EngineNews], Client] | None = None,
        rng: random.Random | None = None,
        pid: int | None = None,
        say: Callable[[str], None] = say,
        spans: SpanExport | None = None,
    ) -> None:
        self._place = place
        self._say = lambda line: say(f"relay {place.number}: {line}")
        self._most_clients = most_clients
        self._lost = lost
        self._rng = random.Random() if rng is None else rng  # noqa: S311 # jitter and tie-breaking, no secrets
        self._clock = asyncio.get_running_loop().time
        self._names = Names()
        self._issuer: Issuer | None = None
        self._client_of = self._new_client if client_of is None else client_of
        self.clients: dict[str, Client] = {}
        self._engines: dict[str, frames.EngineNews] = {}  # as they were told of last
        self.current = current = Current(Snapshot(Policy()))
        self._spans = spans
        self.bodies = BodyMemory(current.policy.body.memory)
        self._counts = CallCounts(self._known)
        self._ended, self._ended_told = EndedCalls(frames.MOST_RECORDS), 0
        self._recorder = Recorder(
            current, self._counts.observe, log, lambda _: None, self._clock, self._rng, self._ended
        )
        self.batches: BatchDoor | None = None  # where they are offered
        self._drain_within: float | None = None
        self._gently = False
        self._drain_order = asyncio.Event()
        self.link = self._new_link(connect, os.getpid() if pid is None else pid)
        self.pipeline = self._new_pipeline(parser)
        settings = server_settings(current.snapshot, most_clients)
        self.server = Server(self.pipeline, settings, self.bodies, place.own_seats)
        self._timer = asyncio.get_running_loop().call_later(COUNT_EVERY, self._tell_counts)

    def _new_link(self, connect: Connect | None, pid: int) -> Link:
        place = self._place
        return Link(
            connect or place.path,
            frames.Hello(frames.VERSION, place.number, place.epoch, pid, place.started, 0),
            self._clock,
            on_policy=self._on_policy,
            on_fleet=self._on_fleet,
            on_drain=self._on_drain,
            counts=self._told,
            say=self._say,
        )

    def _new_pipeline(self, parser: ThreadPoolExecutor | None) -> Pipeline:
        current, spans = self.current, self._spans
        return Pipeline(
            RemoteDecider(self.link),
            Attempts(current, self.clients, self._clock),
            self._recorder.observe,
            self._rng,
            self.bodies,
            large=None if parser is None else LargeBodies(parser, self._clock),
            tracing=None if spans is None else Tracing(current, spans.put, self._rng, self._recorder.labels),
        )

    def offered(self, file: Path | None, policy: Policy) -> AbstractAsyncContextManager[BatchDoor | None]:
        """Files and batches, as a policy offers them, once there is a pipeline."""
        return batches_beside(file, policy, self.pipeline, self.bodies, self._say)

    async def until_drained(self, signals: starting.ProcessSignals) -> None:
        """Wait until the decider or a signal orders the end, then until the calls under way have ended."""
        order = asyncio.ensure_future(self._drain_order.wait())
        first = asyncio.ensure_future(signals.first.wait())
        await asyncio.wait((order, first), return_when=asyncio.FIRST_COMPLETED)
        giving = asyncio.ensure_future(self._give_batches())
        while True:
            self._drain_order.clear()
            within = self.current.policy.timeouts.drain if self._drain_within is None else self._drain_within
            drained = asyncio.ensure_future(self.server.drain(within, gently=self._gently))
            again = asyncio.ensure_future(self._drain_order.wait())
            await asyncio.wait((drained, again), return_when=asyncio.FIRST_COMPLETED)
            again.cancel()
            if drained.done():
                break
            drained.cancel()
        for each in (order, first):
            each.cancel()
        await giving
        self._timer.cancel()  # it would tell a decider that comes meanwhile, and the same be told again
        await self.link.tell_last(partial(self._tell_ended, self._ended_told))

    async def _give_batches(self) -> None:
        if self.batches is not None:
            await self.batches.give()

    async def aclose(self) -> None:
        self.pipeline.mirrors.close()
        self._timer.cancel()
        await self.link.aclose()
        if self._issuer is not None:
            await self._issuer.aclose()
        for client in self.clients.values():
            client.close()
        await self._recorder.aclose()

    # -- news of the decider ------------------------------------------------------------------------------------

    def _on_policy(self, news: frames.PolicyNews) -> None:
        policy = msgspec.msgpack.decode(news.policy, type=Policy)
        self._issuer = starting.issuer_of(policy, news.jwks, self._issuer, self._say)
        self.current.apply(Snapshot(policy, news.cache_secret, self._issuer))
        self.server.settings = server_settings(self.current.snapshot, self._most_clients)
        self.bodies.apply(policy.body.memory // self._place.relays)
        for id, engine in self._engines.items():
            self._go_by(self.clients[id], engine)

    def _on_fleet(self, news: frames.FleetNews) -> None:
        named = {engine.id for engine in news.engines}
        for id in [id for id in self.clients if id not in named]:
            self.clients.pop(id).close()
            self._recorder.labels.pop(id, None)
        for engine in news.engines:
            self._recorder.name(engine.id, engine.label or engine.id)
            client = self.clients.get(engine.id)
            before = self._engines.get(engine.id)
            if client is not None and before is not None and before.url != engine.url:
                client.close()
                client = before = None
            if client is None:
                client = self.clients[engine.id] = self._client_of(engine)
            if before is None or (before.api_key, before.trust) != (engine.api_key, engine.trust):
                self._go_by(client, engine)
        self._engines = {engine.id: engine for engine in news.engines}
        self._abandon_dead()

    def _abandon_dead(self) -> None:
        """Move calls away from dead engines. Some begin there later, with a grant of the moment before."""
        for id, engine in self._engines.items():
            if not engine.up:
                self.clients[id].abandon()

    def _new_client(self, engine: frames.EngineNews) -> Client:
        settings = client_settings(self.current.policy, engine.id)
        return Client(origin_of(engine.id, engine.url), settings, names=self._names)

    def _go_by(self, client: Client, engine: frames.EngineNews) -> None:
        trust = None if engine.trust is None else Trust(ca=engine.trust[0], name=engine.trust[1])
        client.go_by(client_settings(self.current.policy, engine.id), engine.api_key, trust)

    def _on_drain(self, order: frames.DrainOrder) -> None:
        self._drain_within, self._gently = order.within, order.gently
        self._drain_order.set()

    # -- counts -------------------------------------------------------------------------------------------------

    def _known(self, model: str) -> bool:
        return model in self.link.models

    def _tell_counts(self) -> None:
        self._abandon_dead()
        self.link.send(self._told())
        self._tell_ended(self._ended_told)
        self._timer = asyncio.get_running_loop().call_later(COUNT_EVERY, self._tell_counts)

    def _tell_ended(self, told: int) -> None:
        """Send the decider the calls that have ended after the one of this serial number. Without a decider they wait:
        the newest MOST_RECORDS are kept."""
        _, calls = self._ended.after(told, frames.MOST_RECORDS)
        if calls and self.link.connected:
            self._ended_told = self._ended.last
            self.link.send(frames.EndedRecords(list(calls)))

    def _told(self) -> frames.RelayCounts:
        lost_spans = 0 if self._spans is None else self._spans.dropped
        return relay_counts(
            self._counts,
            self.server,
            self.bodies,
            self.pipeline.batcher,
            self.batches,
            lost_lines=self._lost(),
            lost_spans=lost_spans,
        )
