"""Open calls of a simulation's clients: each begins, may leave, and ends once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from loadtest.clients.retries import Clients
from loadtest.lab.dst.case import Call
from loadtest.lab.dst.parts import planned
from loadtest.simulate.simulated_client import ClientCall, Transport


class OpenCalls:
    """`numbers`: of the calls that are open, in the case. `target`: whom they are sent to. `seed` draws clients' whims.
    `tell` takes what happens, `wrong` what must not happen, each a line; `ended` is called after each end."""

    def __init__(
        self,
        seed: int,
        target: Transport,
        tell: Callable[[str], None],
        wrong: Callable[[str], None],
        ended: Callable[[], None],
    ) -> None:
        self.numbers: dict[ClientCall, int] = {}
        self._seed = seed
        self._target = target
        self._tell = tell
        self._wrong = wrong
        self._after_end = ended

    def begin(self, number: int, call: Call) -> None:
        """A client begins a call."""
        rng = random.Random(f"{self._seed} {number}")  # noqa: S311 # a client's whims
        client_call = ClientCall(planned(number, call), self._target, Clients(retries=call.retries), rng, self._ended)
        self.numbers[client_call] = number
        if call.leaves > 0.0:
            asyncio.get_running_loop().call_later(call.leaves, self.leave, client_call)
        client_call.send()
        if not call.leaves:  # before anybody has had a turn
            self.leave(client_call)

    def leave(self, client_call: ClientCall) -> None:
        """Let its client go away, if it is there still."""
        if client_call in self.numbers:
            self._tell(f"client of [{self.numbers[client_call]}] leaves")
            client_call.leave("left")

    def _ended(self, client_call: ClientCall) -> None:
        number = self.numbers.pop(client_call, None)
        if number is None:
            self._wrong("a call ended twice")
        self._tell(f"[{number}] ended: {client_call.tried.outcome}")
        self._after_end()
