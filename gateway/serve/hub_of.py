"""Hub of the relays of one gateway: made of its parts, told its policy, and shown on the control port."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from gateway.control.calls import CallView
from gateway.control.processes import ProcessView
from gateway.decider.loading import Configuration
from gateway.decider.relays.hub import RelayHub
from gateway.decider.relays.session import RelaySession
from gateway.serve.assembly import Gateway
from gateway.serve.processes.place import Place
from gateway.shared.fields import made_of
from gateway.shared.lines import say

if TYPE_CHECKING:
    from gateway.serve.cluster.relay_proxies import RelayProxy


def hub_of(
    gateway: Gateway,
    epoch: int,
    expected: Mapping[int, int],
    left: Callable[[], None] = lambda: None,
    deposed: Callable[[int], None] = lambda _: None,
    lives: Callable[[int], bool] | None = None,
) -> RelayHub:
    """Hub over the parts of this gateway; see RelayHub. On one machine the parent starts one decider."""
    return RelayHub(
        gateway.decider,
        epoch,
        dict(expected),
        engine_of=gateway.engines.held_on,
        shown=gateway.engines.credentials,
        call_ended=gateway.engines.call_ended,
        say=say,
        deposed=deposed,
        lives=lives,
        ended=gateway.ended_calls.add,
        left=left,
    )


def tell_policy(hub: RelayHub, gateway: Gateway, configuration: Configuration) -> None:
    """Relays go by the policy of now."""
    hub.apply(gateway.current.snapshot, (configuration.cache_secret or "").encode())


def calls_of(hub: RelayHub) -> Iterator[CallView]:
    """Return the calls that wait and run at the relays now."""
    now = hub.clock()
    for session in hub.sessions:
        for served in session.calls.values():
            call, grant = served.call, served.grant
            yield made_of(
                CallView,
                call,
                engine=None if grant is None else grant.engine.label,
                state="queued" if grant is None else "running" if grant.hold.prefill else "streaming",
                age_s=round(now - call.arrived, 3),
                deadline_s=round(call.deadline - now, 3),
                held_tokens=call.cost,
                attempts=served.attempts + (grant is not None),
            )


def processes_of(place: Place, calls: int, relays: Iterable[RelaySession | RelayProxy]) -> list[ProcessView]:
    """Return the processes of one gateway: its parent, its decider, for which `calls` have ended, and its relays."""
    return [
        ProcessView("parent", place.parent, place.parent_started, 0, 0),
        ProcessView("decider", os.getpid(), place.started, calls, 0),
        *relays_of(relays),
    ]


def relays_of(relays: Iterable[RelaySession | RelayProxy]) -> list[ProcessView]:
    """Return the relays' processes."""
    here = [(relay.hello, relay.counts) for relay in relays if relay.hello is not None]
    views = []
    for hello, counts in sorted(here, key=lambda each: each[0].relay):
        of_calls = (0, 0) if counts is None else (counts.ended, counts.connections)
        views.append(ProcessView("relay", hello.pid, hello.started, *of_calls))
    return views
