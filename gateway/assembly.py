"""Every object of one gateway, built once and wired together; and the one place where a new policy takes effect.

`apply` is a reload: everything that can be wrong with the new policy is found before anything changes. Then the
snapshot is swapped, and what has state (buckets, queues, ledgers, breakers, learned rates) goes by the new policy with
the state it has. Engines the policy no longer names get no new calls and are forgotten once their last one has ended.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from gateway.attempts import Attempts
from gateway.calllog import CallLog
from gateway.control.calls import CallView
from gateway.core.cost import CostModel
from gateway.core.fleet import Engine, Fleet
from gateway.core.limits import LimitBook
from gateway.core.outcome import Record
from gateway.core.policy import EngineEntry, Policy
from gateway.core.retries import RetryBudget
from gateway.core.shadow import Shadow
from gateway.core.snapshot import Snapshot
from gateway.dispatch import Dispatch
from gateway.loading import Configuration
from gateway.metrics import Metrics
from gateway.pipeline import Pipeline
from gateway.telemetry import Telemetry
from gateway.wire.client import Client, ClientSettings, parse_origin
from gateway.wire.server import Server, ServerSettings

if TYPE_CHECKING:
    from gateway.kv_events import KvEvents

NO_PYZMQ = "kv_events: pyzmq is not installed: pip install 'weir[kv-events]', or leave kv_events out"


class ApplyError(Exception):
    """A policy that is well-formed and cannot be used here; the message says why."""


class Gateway:
    """What `serve` runs, and what a test or a simulation drives.

    `entries` are engines beside the policy's: the command line's, which stay whatever the policy says. `shadow` is a
    second policy that is asked about every call and never obeyed. Raises ValueError for a policy that only looks right.
    """

    def __init__(
        self,
        policy: Policy,
        entries: Sequence[EngineEntry],
        log: CallLog | None,
        rng: random.Random,
        api_keys: Mapping[str, str] | None = None,
        shadow: Policy | None = None,
    ) -> None:
        self.policy = policy
        self.log = log
        self.rng = rng
        self.clock = asyncio.get_running_loop().time
        self.fleet = Fleet()
        self.clients: dict[str, Client] = {}
        self.dispatch = Dispatch(self.fleet, policy, rng, self.clock)
        self.telemetry = Telemetry(self.fleet, self.changed, self.clock)
        self.kv_events: KvEvents | None = None  # from the first policy on that wants them
        self.limits = LimitBook(policy)
        self.retries = RetryBudget(policy.retries)
        self.attempts = Attempts(policy, self.fleet, self.dispatch, self.retries, self.clients, self.clock, rng)
        self.pipeline = Pipeline(
            Snapshot(policy),
            self.fleet,
            self.dispatch,
            self.limits,
            CostModel(policy.budget.alpha),
            self.attempts,
            self.observe,
            self.clock,
            rng,
        )
        self.server = Server(self.pipeline, server_settings(policy))
        self.metrics = Metrics(
            self.fleet,
            self.dispatch,
            lambda: self.server.connections,
            lambda: self.server.refusals,
            self.retries,
            self.pipeline.batcher,
        )
        self.pipeline.shadow = self.metrics.shadow = None if shadow is None else Shadow(shadow, self._shadow_failed)
        self._fixed = tuple(entries)
        self._retired: list[Engine] = []
        self._engines(self._entries(policy), api_keys or {})

    # -- a reload -----------------------------------------------------------------------------------------------

    def apply(self, configuration: Configuration) -> None:
        """Go by this policy from now on. Raises ApplyError, and then nothing has changed."""
        policy = configuration.policy
        entries = self._entries(policy)
        snapshot = Snapshot(policy)
        self.policy = policy
        self.pipeline.snapshot = snapshot
        self.attempts.policy = policy
        self.retries.policy = policy.retries
        self.pipeline.cost.fix(policy.budget.alpha)
        self.limits.apply(policy, self.clock())
        self._engines(entries, configuration.api_keys)
        self.server.settings = server_settings(policy)
        self.dispatch.apply(policy)

    def apply_shadow(self, configuration: Configuration) -> None:
        """Ask this policy from now on, where a shadow was wanted at the start. Raises ValueError, and then nothing has
        changed."""
        if self.pipeline.shadow is not None:
            self.pipeline.shadow.apply(configuration.policy, self.clock())

    def _shadow_failed(self, error: Exception) -> None:
        """A bug in the shadow: the first is told, with its traceback; no call notices."""
        message = "the shadow policy failed; nothing that is enforced has changed, and no further failure is reported"
        asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})

    def _entries(self, policy: Policy) -> dict[str, EngineEntry]:
        """The engines there are to be, by id. Raises ApplyError if the policy names one of the command line's, or wants
        events that cannot be listened to."""
        entries = {engine_id(entry.url): entry for entry in self._fixed}
        for entry in policy.fleet.engines:
            id = engine_id(entry.url)
            if id in entries:
                raise ApplyError(f"the engine {id} is there twice: in the policy, and there or on the command line")
            entries[id] = entry
        if self.kv_events is None and any(entry.kv_events for entry in entries.values()):
            self.kv_events = self._listeners()
        return entries

    def _listeners(self) -> KvEvents:
        try:
            from gateway.kv_events import KvEvents  # noqa: PLC0415 # pyzmq is an extra
        except ModuleNotFoundError as error:
            raise ApplyError(NO_PYZMQ) from error
        return KvEvents(self.clock)

    def _engines(self, entries: Mapping[str, EngineEntry], api_keys: Mapping[str, str]) -> None:
        """Make the fleet what `entries` say."""
        for engine in list(self.fleet):
            if engine.id not in entries:
                engine.draining = True
                if engine not in self._retired:
                    self._retired.append(engine)
        settings = client_settings(self.policy)
        for id, entry in entries.items():
            if id not in self.fleet.engines:
                self.fleet.add(Engine(id, entry.url, self.policy))
                self.clients[id] = Client(parse_origin(entry.url), settings)
            engine = self.fleet.engines[id]
            if engine in self._retired:
                self._retired.remove(engine)
                engine.draining = False
            engine.apply(self.policy)
            engine.go_by(entry)
            self.fleet.has_models(engine, engine.models.values())  # those it may no longer serve are gone at once
            self.clients[id].go_by(settings, api_keys.get(entry.url))
            self.telemetry.watch(engine, api_keys.get(entry.url))
            if self.kv_events is not None:
                self.kv_events.listen(engine, entry.kv_events)
        self._retire()

    def _retire(self) -> None:
        """Forget the engines that are no longer wanted and have nothing left to do."""
        for engine in [engine for engine in self._retired if not engine.in_flight]:
            self._retired.remove(engine)
            self.fleet.remove(engine.id)
            self.telemetry.forget(engine)
            if self.kv_events is not None:
                self.kv_events.forget(engine)
            self.clients.pop(engine.id).close()

    # -- what an operator asks for ------------------------------------------------------------------------------

    def calls(self) -> Iterator[CallView]:
        """What waits and runs now."""
        now = self.clock()
        for live in self.pipeline.tasks.values():
            record = live.record
            if live.call is not None:
                yield CallView(
                    request_id=record.request_id,
                    tenant=record.tenant,
                    class_name=live.call.class_name,
                    model=record.model,
                    engine=record.engine or None,
                    state="streaming" if record.ttft else "running" if record.engine else "queued",
                    age_s=round(now - live.call.arrived, 3),
                    deadline_s=round(live.call.deadline - now, 3),
                    held_tokens=live.call.cost,
                    attempts=record.attempts,
                )

    def is_user_key(self, key: str) -> bool:
        """Whether this is a key of the data port's, as the policy of now has them."""
        return self.pipeline.snapshot.tenants.has_key(key)

    def drain_engine(self, engine: Engine, wanted: bool) -> None:
        """No new calls for an engine, or new ones again; one that the policy no longer names gets none in any case."""
        engine.draining = wanted or engine in self._retired
        self.dispatch.changed(engine)

    # -- what the others tell -----------------------------------------------------------------------------------

    def changed(self, engine: Engine) -> None:
        """There is news of an engine: let what waits move, and what waits for a dead one go elsewhere."""
        if not engine.up and engine.in_flight:
            self.clients[engine.id].abandon()
        self.dispatch.changed(engine)

    def observe(self, record: Record) -> None:
        """The end of every call: counted, and logged by the policy's share."""
        self.metrics.observe(record)
        share = self.policy.logging.calls
        if self.log is not None and (share >= 1 or self.rng.random() < share):
            self.log.write(record, self.clock())
        if self._retired:
            self._retire()

    async def aclose(self) -> None:
        await self.telemetry.aclose()
        if self.kv_events is not None:
            await self.kv_events.aclose()
        for client in self.clients.values():
            client.close()
        if self.log is not None:
            await self.log.aclose()


def engine_id(url: str) -> str:
    """How metrics, logs and headers call an engine: its URL without the scheme."""
    return url.partition("://")[2].rstrip("/")


def client_settings(policy: Policy) -> ClientSettings:
    """What a pool of connections to an engine needs of the policy."""
    return ClientSettings(connect_timeout=policy.timeouts.connect, stall_timeout=policy.timeouts.stall)


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
