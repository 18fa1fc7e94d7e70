"""Leadership of one member: in each of its terms it has a hub for all machines' relays, and grants within its lease."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping

from gateway.core.cluster.election import Election
from gateway.decider.loading import Configuration
from gateway.decider.relays.hub import RelayHub
from gateway.frames.entrance import Token
from gateway.serve.assembly import Gateway
from gateway.serve.cluster.checkpoints import TermCheckpoints
from gateway.serve.hub_of import hub_of
from gateway.shared.tasks import telling


class Leadership:
    """`hub`: of the present term; None: another member leads, or nobody.

    `expected` returns the process of each relay that lives when a term begins, by its number. `lives` says whether a
    relay's process is there. `deposed` receives the epoch of a member that leads in place of this one.
    """

    def __init__(
        self,
        gateway: Gateway,
        checkpoints: TermCheckpoints,
        configuration: Configuration,
        token: Token,
        *,
        expected: Callable[[], Mapping[int, int]],
        lives: Callable[[int], bool],
        deposed: Callable[[int], None],
    ) -> None:
        self.hub: RelayHub | None = None
        self._gateway = gateway
        self._checkpoints = checkpoints
        self._configuration = configuration
        self._token = token
        self._expected = expected
        self._lives = lives
        self._deposed = deposed
        self._term = 0
        self._before = 0  # epoch of the last leader but this member
        gateway.dispatch.set_lease(-math.inf)

    def start(self) -> None:
        """Save checkpoints from now on, while this member leads."""
        self._checkpoints.start()

    def apply(self, configuration: Configuration) -> None:
        """Tell the relays of the gateway's policy."""
        self._configuration = configuration
        if self.hub is not None:
            named = configuration.policy.routing.cache_secret_file is not None
            secret = configuration.cache_secret if named else self._token.secret("cache salts")
            self.hub.apply(self._gateway.current.snapshot, (secret or "").encode())

    def follow(self, election: Election) -> None:
        """Begin or end a term, as the election has it."""
        if election.term != self._term:
            before = self._term or self._before
            old, self.hub, self._term = self.hub, None, election.term
            self._checkpoints.ends()
            if old is not None:
                task = asyncio.get_running_loop().create_task(old.aclose())
                task.add_done_callback(telling("the relays of a term that is over"))
            if self._term:
                expected = self._expected()
                self.hub = hub_of(self._gateway, self._term, expected, deposed=self._deposed, lives=self._lives)
                self.hub.start()
                self.apply(self._configuration)
                self._checkpoints.begins(self.hub, before)
        self._before = self._before if self._term else election.known

    def set_lease(self, election: Election, now: float) -> None:
        """Grant until the end of the lease, once every relay has told what it holds."""
        if self.hub is not None and self.hub.complete:
            for name in list(election.awaited):
                election.synced(name)
        self._gateway.dispatch.set_lease(election.lease_until(now))

    def hand_over(self) -> None:
        """Grant nothing more: another process decides for what comes and waits."""
        self._gateway.dispatch.set_lease(-math.inf)
        self._checkpoints.ends()

    async def stop(self) -> None:
        """Save no more checkpoints."""
        await self._checkpoints.aclose()

    async def aclose(self) -> None:
        if self.hub is not None:
            await self.hub.aclose()
