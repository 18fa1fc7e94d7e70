"""Laws of a gateway's calls: each client's requests and answers, compared with the gateway's record of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from msgspec import UNSET

from gateway.core.admission.retries import PER_CALL
from gateway.core.admission.witness import Witnesses
from gateway.core.kv_transfer import FETCH
from gateway.core.request.record import Record
from gateway.relay.epp.lending import GRACE
from loadtest.clients.calls import ClientCall
from loadtest.lab.dst.books import Charges, Ledger
from loadtest.lab.dst.case import KEYS, Call
from loadtest.lab.dst.invariants import BACKOFF, SLACK, Invariants
from loadtest.lab.dst.proxies import Proxies
from loadtest.simulate.inprocess import GatewayTarget, Watcher

if TYPE_CHECKING:
    from loadtest.lab.dst.world import World

# What a client sees, and what the gateway may call it; anything else has the same name on both sides. Who leaves in the
# very moment of an answer's end sees nothing of it.
AGREES = {"left": {"client_gone", "ok", "expired", "shed", "upstream"}, "truncated": {"truncated", "expired"}}
# The same where a proxy is between them, which may die.
AGREES_PROXIED = AGREES | {
    "cut": {"truncated", "client_gone"},
    "unanswered": {"client_gone"},
    "upstream": {"upstream", "expired"},
}
DIES = ("lost", "dies")


class CallLaws:
    """Laws of a gateway that is one process. `watch` comes before the first call, `watcher` is for the gateway."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tell = world.tell
        self._wrong = wrong = world.found
        self._loop = world.loop
        self._flighty: dict[str, ClientCall] = {}  # by request id: clients that leave as soon as it is their turn
        self._sent: set[bytes] = set()  # request ids that an engine was sent
        self.charges = Charges(self._whose)
        self.ledger = Ledger(self.charges, wrong)
        self.invariants = Invariants(wrong, self._granted)
        self.watcher = Watcher(
            witnesses=Witnesses(dispatch=self.invariants, limits=self.charges, batches=self.invariants.batches),
            say=world.tell, sending=self.sending, failed=self.ledger.failed, heard=world.heard,
        )  # fmt: skip

    def watch(self, target: GatewayTarget, proxies: Proxies) -> None:
        """Set the gateway that is called."""
        self._target = target
        self._proxies = proxies
        self.invariants.watch(target.gateway)

    def leaves_granted(self, client_call: ClientCall) -> None:
        """Let the client of the last call leave in the very moment it gets its turn."""
        if self._target.records.open:
            self._flighty[next(reversed(self._target.records.open))] = client_call

    def _granted(self, request_id: str, engine: str) -> None:
        self._tell(f"grant {request_id} on {engine}")
        client_call = self._flighty.pop(request_id, None)
        if client_call is not None:
            self._loop.call_soon(self._world.leave, client_call)

    def _whose(self) -> str:
        """The id of the call whose task runs."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 # calls are charged in their own
        tasks = self._target.gateway.pipeline.tasks
        live = tasks[task] if task in tasks else self._proxies.pipeline.tasks[task]
        return live.record.request_id

    def sending(self, request_id: bytes) -> None:
        """An engine is sent a request."""
        self.invariants.retries.sends += request_id in self._sent
        self._sent.add(request_id)

    def judge(self, record: Record, call: Call) -> None:
        """Compare the record of a call with what its client asked."""
        if record.tenant and record.tenant != KEYS[call.key]:
            self._wrong(f"call {record.request_id} of {KEYS[call.key]} is the tenant {record.tenant}'s")
        if (record.outcome.value, record.status) == ("engine_refused", 400):  # a priority, sent to one that has none
            self._wrong(f"call {record.request_id} has in it what {record.engine} does not take: {record.reason}")
        within = max(call.within, call.upload) + (0.0 if call.proxied is None else GRACE)
        if self._world.case.cancels and call.within and record.total > within + BACKOFF:
            self._wrong(f"call {record.request_id} had {within} s and took {record.total:.4f} s")
        unfetched = record.prefill is not UNSET and record.prefill.failure == FETCH
        self.invariants.retries.free += unfetched  # the same engine reads the prompt itself
        if record.attempts > 1 + PER_CALL + 1 + unfetched:  # the last of them may have been hedged
            self._wrong(f"call {record.request_id} was sent {record.attempts} times")
        self.invariants.ended(record.request_id)
        self.ledger.count(record)

    def copied(self, record: Record) -> None:
        """A copy of a call for a mirror has ended."""
        if record.request_id in self.charges.made:
            self._wrong(f"the copy {record.request_id} was charged")
        self.invariants.ended(record.request_id)

    def settled(self) -> None:
        """All calls have ended: both sides say the same of each."""
        self.invariants.idle()
        for left in self._target.left_over() + self._proxies.left_over():
            self._wrong(left)
        self.charges.compare(self._target.gateway.limits, self._wrong)
        for tried, call in self._world.asked.values():
            agrees = AGREES if call.proxied is None else AGREES_PROXIED
            may = agrees.get(tried.outcome, {tried.outcome})
            if tried.recorded not in may and not (call.upload and tried.outcome == "left" and not tried.recorded):
                self._wrong(f"the client of {call} saw {tried.outcome!r}, the gateway {tried.recorded!r}")
            if tried.recorded_at - tried.finished > SLACK and call.proxied not in DIES:
                late = tried.recorded_at - tried.finished
                self._wrong(f"the client of {call} was done {late:.6f} s before its record")
