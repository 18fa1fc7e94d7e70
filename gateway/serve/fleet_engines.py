"""Engines of one gateway: which there are to be, by whom they are named, and how they join, change, drain and leave.

The policy names engines, and providers; so do the command line, the pods of an InferencePool, and sidecars. An engine
that nobody names any more gets no new calls and is forgotten once its last one has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from gateway.core.engines.announcer import Announcer
from gateway.core.engines.engine import Engine
from gateway.core.engines.origin import PROVIDER, engine_id, origin_of, provider_of
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.core.sidecars.addresses import is_relayed
from gateway.core.sidecars.sidecar import Member
from gateway.decider.checkpoint import Checkpoints
from gateway.decider.dispatch import Dispatch
from gateway.decider.kubernetes.api import Unreachable
from gateway.decider.kubernetes.source import PodEngines
from gateway.decider.loading import Configuration
from gateway.decider.recorder import Recorder
from gateway.decider.report_intake import ReportIntake
from gateway.decider.telemetry import Telemetry
from gateway.decider.waking import Waking
from gateway.serve.starting import ApplyError
from gateway.shared.vllm.answers import ModelCard
from gateway.upstream.client import Client, ClientSettings
from gateway.upstream.trust import Trust

if TYPE_CHECKING:
    from gateway.decider.cache_events import KvEvents

MOST_OUTSIDE = 4096  # calls at a provider at once: its own bound is its 429, whose Retry-After is obeyed
UNBOUNDED = 10**12  # tokens: a provider has no KV cache that calls here could fill
PROVIDER_CONNECTS_WITHIN = 5.0  # seconds, TLS included
MOST_HEAD = 512 * 1024  # bytes of an answer's head: one line of it tells the shapes of vectors that are given as bytes
NO_PYZMQ = "kv_events: pyzmq is not installed: pip install 'WEIR.whl[kv-events]', or leave kv_events out"


class FleetEngines:
    """Engines of the fleet, with a pool of connections, a watcher and a name for each.

    `fixed`: engines beside the policy's, which stay whatever the policy says. `say` takes lines for the operator.
    """

    def __init__(
        self,
        configuration: Configuration,
        fixed: Sequence[EngineEntry],
        dispatch: Dispatch,
        telemetry: Telemetry,
        recorder: Recorder,
        checkpoints: Checkpoints,
        waking: Waking,
        *,
        say: Callable[[str], None],
    ) -> None:
        self.clients: dict[str, Client] = {}  # by engine id
        self.retired: dict[Engine, str] = {}  # engines to be forgotten, and why
        self.brought: dict[str, Member] = {}  # by sidecars, by engine id
        self.kv_events: KvEvents | None = None  # from the first policy on that wants them
        self.sidecars = ReportIntake(dispatch, self, waking.heard, say)
        self._configuration = configuration
        self._fixed = tuple(fixed)
        self._fleet = dispatch.fleet
        self._dispatch = dispatch
        self._telemetry = telemetry
        self._recorder = recorder
        self._checkpoints = checkpoints
        self._waking = waking
        self._clock = dispatch.clock
        self._say = say
        self._announcer = Announcer()
        self._pods = PodEngines(self._pods_changed, say, dispatch.rng)

    # -- a policy -----------------------------------------------------------------------------------------------

    def check(self, policy: Policy) -> None:
        """Raises ApplyError if the policy names one of the command line's engines, or wants what is not here."""
        self._entries(policy)

    def watch_pods(self, policy: Policy) -> None:
        """Raises ApplyError where no API server can be asked for the pods that the policy wants."""
        try:
            self._pods.apply(policy.fleet.inference_pool)
        except Unreachable as error:
            raise ApplyError(f"fleet.inference_pool: {error}") from error

    def _pods_changed(self) -> None:
        """Make the fleet what the pods of now say."""
        self.apply(self._configuration)
        self._dispatch.pump()

    def _entries(self, policy: Policy) -> dict[str, EngineEntry]:
        """The engines there are to be, by id. Raises ApplyError if the policy names one of the command line's, or wants
        events that cannot be listened to."""
        entries = {engine_id(entry.url): entry for entry in self._fixed}
        for entry in policy.fleet.engines:
            id = engine_id(entry.url)
            if id in entries:
                raise ApplyError(f"the engine {id} is there twice: in the policy, and there or on the command line")
            entries[id] = entry
        entries = {**self._pods.entries, **entries, **provider_entries(policy)}
        if self.kv_events is None and any(entry.kv_events for entry in entries.values()):
            self.kv_events = self._listeners()
        return entries

    def _listeners(self) -> KvEvents:
        try:
            from gateway.decider.cache_events import KvEvents  # noqa: PLC0415 # pyzmq is an extra
        except ModuleNotFoundError as error:
            raise ApplyError(NO_PYZMQ) from error
        return KvEvents(self._clock)

    def apply(self, configuration: Configuration) -> None:
        """Make the fleet what the policy and the pods say, with what sidecars have brought and may still bring."""
        self._configuration = configuration
        policy, api_keys = configuration.policy, configuration.api_keys
        entries = self._entries(policy)
        self._waking.go_by(configuration.orders_by, configuration.sidecar_trust)
        self.sidecars.apply(policy.fleet.sidecars, configuration.sidecar_tokens, entries)
        for engine in list(self._fleet):
            if engine.id in self.brought:
                engine.apply(policy)
                self._present(engine)
            elif engine.id not in entries:
                self._leaves(engine, "the policy no longer names it")
        for id, entry in entries.items():
            engine = self._engine(id, entry.url)
            engine.apply(policy)
            engine.go_by(entry)
            self._fleet.has_models(engine, engine.told)  # those it may serve now, and no others, at once
            self._recorder.name(id, engine.label)
            key = api_keys.get(engine.provider or entry.url)
            self.clients[id].go_by(client_settings(policy, id), key)
            if engine.provider:
                self._fleet.has_models(engine, [ModelCard(id=model) for model in entry.models])
                if not engine.health.up:
                    engine.ready(self._clock())
            self._telemetry.watch(engine, key)
            if self.kv_events is not None:
                self.kv_events.listen(engine, entry.kv_events)
        self._retire()

    def _engine(self, id: str, url: str) -> Engine:
        """The engine of this id, made if there is none; one that was to be forgotten is wanted again."""
        if id not in self._fleet.engines:
            provider = provider_of(id)
            self._fleet.add(Engine(id, url, self._configuration.policy, capacity=UNBOUNDED if provider else None))
            self._fleet.engines[id].provider = provider
            self._new_client(id, url)
        engine = self._fleet.engines[id]
        if engine.provider and engine.url != url:
            self._moved(engine, url)
        if self.retired.pop(engine, None) is not None:
            engine.draining, engine.closed, engine.leaving = engine.drained, False, False
        return engine

    def _new_client(self, id: str, url: str) -> None:
        settings = client_settings(self._configuration.policy, id)
        self.clients[id] = Client(origin_of(id, url), settings, names=self._telemetry.names)

    def _moved(self, engine: Engine, url: str) -> None:
        """Connect to the engine at another address from now on."""
        engine.url = url
        self.clients.pop(engine.id).close()
        self._new_client(engine.id, url)

    def _leaves(self, engine: Engine, why: str) -> None:
        """Send the engine no new calls, and forget it once it has none."""
        engine.draining = engine.leaving = True
        self.retired.setdefault(engine, why)
        self._tell(engine)

    def _retire(self) -> None:
        """Forget the engines that are no longer wanted and have nothing left to do."""
        for engine in [engine for engine in self.retired if not engine.ledger.in_flight]:
            del self.retired[engine]
            self._announcer.forget(engine.id)
            self._recorder.labels.pop(engine.id, None)
            self._fleet.remove(engine.id)
            self._telemetry.forget(engine)
            if self.kv_events is not None:
                self.kv_events.forget(engine)
            self.clients.pop(engine.id).close()
        self._recorder.watched = bool(self.retired or self.brought)

    # -- engines of sidecars ------------------------------------------------------------------------------------

    def join(self, member: Member) -> None:
        """Add a sidecar's new engine. Its report is trusted, so calls may go there at once."""
        engine = self._engine(member.id, member.url)
        self.brought[member.id] = member
        self._recorder.watched = True
        engine.label = f"{member.profile}@{member.sidecar}"
        self._recorder.name(member.id, engine.label)
        self._open(engine, member)
        self._checkpoints.joined(engine)
        self._present(engine)

    def update(self, member: Member) -> None:
        """Take over changes of a sidecar's engine. A model that is put to sleep gets no further call."""
        engine, before = self._fleet.engines[member.id], self.brought[member.id]
        self.brought[member.id] = member
        if member.url != before.url:  # its relay has TLS now, or no longer
            self._moved(engine, member.url)
            self._telemetry.forget(engine)
            self._present(engine)
        role = (member.transfer, member.role) != (before.transfer, before.role)
        if member.open and (not before.open or member.served != before.served or role):
            self._open(engine, member)
        elif member.open:
            engine.expect_sizes(member.kv_tokens, member.max_concurrency)
        else:
            engine.draining = engine.closed = True
            self._tell(engine)
            self._dispatch.changed(engine)

    def leave(self, id: str) -> None:
        """Remove an engine that its sidecar no longer has, or may no longer bring."""
        del self.brought[id]
        engine = self._fleet.engines[id]
        self._leaves(engine, "its sidecar no longer has it, or may not bring it")
        self._dispatch.changed(engine)
        self._retire()

    def held_on(self, id: str, url: str) -> Engine:
        """The engine that a call of before this decider's time is on: one that is not known gets no other calls."""
        engine = self._fleet.engines.get(id)
        if engine is None:
            engine = self._engine(id, url)
            self._leaves(engine, "it is not known yet, and ends its calls")
            self._recorder.watched = True
        return engine

    def _open(self, engine: Engine, member: Member) -> None:
        """Open the engine for calls to the models that it serves."""
        engine.expect_sizes(member.kv_tokens, member.max_concurrency)
        engine.priorities = member.priorities
        self._fleet.take_role(engine, member.transfer, member.role)
        if not engine.models.keys() >= set(member.served):
            context = member.context_length or None
            model = member.served[0]  # the others are its LoRA adapters
            cards = [
                ModelCard(id=name, max_model_len=context, parent=None if name == model else model)
                for name in member.served
            ]
            self._fleet.has_models(engine, cards)
        engine.ready(self._clock())
        engine.draining, engine.closed = engine.drained, False
        self.changed(engine)

    def drain(self, engine: Engine, wanted: bool) -> None:
        """No new calls for an engine, or new ones again; one that the policy no longer names, or that its sidecar is
        about to put to sleep or has, gets none in any case."""
        engine.drained = wanted
        engine.draining = wanted or engine.closed or engine.leaving
        self._tell(engine)
        self._dispatch.changed(engine)

    def changed(self, engine: Engine) -> None:
        """React to a change of an engine: grant waiting calls, and move calls away from a dead engine."""
        if not engine.health.up and engine.ledger.in_flight:
            self.clients[engine.id].abandon()
        self._dispatch.changed(engine)
        self._tell(engine)

    def call_ended(self, id: str) -> None:
        """A call of this engine (empty: of none) has ended while engines come and go."""
        if not self._recorder.watched:
            return
        if id in self.brought:
            self._dispatch.sidecars.used(id, self._clock())
        self._retire()

    def _present(self, engine: Engine) -> None:
        """Show a sidecar's engine its key and trust, for calls and for checks."""
        credentials = self.credentials(engine)
        self.clients[engine.id].go_by(client_settings(self._configuration.policy), *credentials)
        self._telemetry.watch(engine, *credentials)

    def credentials(self, engine: Engine) -> tuple[str | None, Trust | None]:
        """Key and trust to present to an engine. A sidecar's relay gets the order token, its engines get nothing."""
        configuration = self._configuration
        if engine.id not in self.brought:
            return configuration.api_keys.get(engine.provider or engine.url), None
        return (configuration.orders_by, configuration.sidecar_trust) if is_relayed(engine.url) else (None, None)

    def _tell(self, engine: Engine) -> None:
        """Log what has changed about an engine since the last line."""
        for line in self._announcer.look(engine, self._clock(), self._drained(engine)):
            self._say(line)

    def _drained(self, engine: Engine) -> str:
        """Reason why an engine gets no new calls; empty if it gets them."""
        if not engine.draining:
            return ""
        by_hand = "drained by an operator" if engine.drained else ""
        return self.retired.get(engine) or by_hand or "its sidecar puts it to sleep, or ends it"

    async def aclose(self) -> None:
        self.sidecars.close()
        await self._pods.aclose()
        await self._telemetry.aclose()
        if self.kv_events is not None:
            await self.kv_events.aclose()
        for client in self.clients.values():
            client.close()


def client_settings(policy: Policy, id: str = "") -> ClientSettings:
    """Return what a pool of connections to an engine needs of the policy; to a provider, by its `id`."""
    name = provider_of(id)
    if not name:
        return ClientSettings(stall_timeout=policy.timeouts.stall, max_head=MOST_HEAD)
    provider = policy.providers.get(name)
    if provider is None or not provider.allow_private:
        network: Literal["any", "public", "private"] = "public"
    else:  # a key that goes out in the clear stays in the house
        network = "any" if provider.url.startswith("https:") else "private"
    return ClientSettings(
        stall_timeout=policy.timeouts.stall,
        connect_timeout=PROVIDER_CONNECTS_WITHIN,
        network=network,
        resends=False,
    )


def provider_entries(policy: Policy) -> dict[str, EngineEntry]:
    """Return the policy's providers as engines, by id."""
    return {
        PROVIDER + name: EngineEntry(url=each.url, name=name, models=tuple(each.models), max_concurrency=MOST_OUTSIDE)
        for name, each in policy.providers.items()
    }
