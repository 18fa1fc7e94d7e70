"""Link of one relay to the decider that leads: questions out, answers in, and both again after a decider has gone.

A call that is asked for stays asked for. While there is no decider it waits here, with the time of its arrival, until a
decider answers or its deadline is over. A new decider is told first what this relay holds, and is asked again after
that, in the old order. A decider of a lower epoch than one that was met before is not obeyed: see
`gateway/core/cluster/fencing.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import msgspec

from gateway.core.admission import refusals
from gateway.core.cluster.fencing import FencingToken
from gateway.frames import messages as frames
from gateway.frames.calls import refusal_of
from gateway.frames.channel import Channel
from gateway.frames.codec import from_decider
from gateway.relay.remote.asked import AskedCall
from gateway.shared.tasks import cancel, done_within, lasting

RETRY = 0.05  # seconds between two tries to reach a decider
LOOK = 0.1  # seconds between two looks at the deadlines of calls that wait for a decider
TOLD_WITHIN = 2.0  # seconds for a decider to be there for the last totals
LATE = 0.25  # seconds after its deadline by which a call has its answer from a decider that does not hang
# Opens a connection whose protocol is made by its argument. Raises OSError.
Connect: TypeAlias = Callable[[Callable[[], Channel]], Awaitable[object]]


class Link(msgspec.Struct, eq=False):
    """Link of one relay to its decider, at the unix socket of this path or by `connect`. `hello` identifies this relay.
    `on_policy`, `on_fleet` and `on_drain` receive the decider's news. `counts` returns the relay's totals; `say` takes
    lines for the operator. `clock` returns the loop's time."""

    _connect: Connect | str
    _hello: frames.Hello
    clock: Callable[[], float]
    on_policy: Callable[[frames.PolicyNews], None]
    on_fleet: Callable[[frames.FleetNews], None]
    on_drain: Callable[[frames.DrainOrder], None]
    counts: Callable[[], frames.RelayCounts]
    say: Callable[[str], None]
    calls: dict[int, AskedCall] = {}  # by number, hence in the order of their arrival
    by_call: dict[int, AskedCall] = {}  # by the identity of the call, which its AskedCall keeps alive
    policy: frames.PolicyNews | None = None
    metered: frozenset[str] = frozenset()
    models: dict[str, frames.ModelNews] = {}
    up: bool = False
    ready: asyncio.Event = msgspec.field(default_factory=asyncio.Event)  # a policy and a fleet are known
    _token: FencingToken = msgspec.field(default_factory=FencingToken)
    _channel: Channel | None = None  # once it is welcome
    _opened: Channel | None = None
    _gone: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    _named: bool = False  # this decider has named another, since it was told last
    _number: int = 0
    _said: str = ""  # the last line about the decider
    _task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._token.raise_to(self._hello.decider_epoch)

    def start(self) -> None:
        """Keep a decider from now on."""
        self._task = lasting("the link to the decider", self._keep)

    @property
    def connected(self) -> bool:
        return self._channel is not None

    @property
    def epoch(self) -> int:
        """Epoch of the decider that is obeyed: the highest that was met."""
        return self._token.epoch

    @property
    def version(self) -> int:
        """Version of the policy that applies to calls now; 0 before the first."""
        return 0 if self.policy is None else self.policy.version

    def number(self) -> int:
        """The next call's."""
        self._number += 1
        return self._number

    def send(self, message: frames.Message) -> None:
        """Send a message, if there is a decider. A new decider receives what it must know when it comes."""
        if self._channel is not None:
            self._channel.send(message)

    async def tell_last(self, more: Callable[[], None] = lambda: None) -> None:
        """Tell the totals, and what `more` sends, before an end, to a decider that is there within TOLD_WITHIN seconds.

        Returns once the decider has closed the connection, or is late. A decider that lives has read all by then; one
        that is killed may not have, and its successor is not told. A decider that writes to a connection whose other
        end is gone loses what it has not read. One that hands over hears no more: all is told again to the decider that
        it names."""
        until = self.clock() + TOLD_WITHIN
        self._named = True
        while self._named:
            while self._channel is None and self.clock() < until:  # noqa: ASYNC110 # once, at the end
                await asyncio.sleep(RETRY / 5)
            self.send(self.counts())
            more()
            channel, self._channel, self._named = self._channel, None, False
            if channel is not None and channel.end():
                await done_within(self._gone.wait(), until - self.clock())
        await cancel(self._task)

    def _leave(self, decider: str) -> None:
        """Leave this decider for the one at this socket, which receives this relay's holds."""
        if isinstance(self._connect, str):
            self._connect = decider
        self._channel, self._named = None, True
        if self._opened is not None:
            self._opened.close()

    async def aclose(self) -> None:
        """End the link, without a message to the decider."""
        self._channel = None
        await cancel(self._task)
        if self._opened is not None:
            self._opened.close()

    # -- the connection -----------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            self._gone.clear()
            opened = self._opened = Channel(from_decider(), self._take, self._lost)
            try:
                await self._open(partial(_this, opened))
            except OSError as error:
                self._tell(f"the decider cannot be reached: {error}")
            else:
                self._hello.decider_epoch = self.epoch
                opened.send(self._hello)
                await self._until_gone()
            self._channel = None
            self.refuse_late()
            await asyncio.sleep(RETRY)

    async def _open(self, made: Callable[[], Channel]) -> None:
        if isinstance(self._connect, str):
            await asyncio.get_running_loop().create_unix_connection(made, self._connect)
        else:
            await self._connect(made)

    async def _until_gone(self) -> None:
        """Wait until the connection ends. Meanwhile, refuse calls whose wait for a welcome or a hanging decider is
        over."""
        while not self._gone.is_set():
            within = LOOK if self._channel is None else LATE
            try:
                async with asyncio.timeout(within):
                    await self._gone.wait()
            except TimeoutError:
                self.refuse_late()

    def _lost(self, why: str) -> None:
        if self._channel is not None or why:
            self._tell(f"the decider is gone{f': {why}' if why else ''}; calls wait for the next")
        self._channel = None
        self._gone.set()

    def _tell(self, line: str) -> None:
        if line != self._said:
            self._said = line
            self.say(line)

    def refuse_late(self) -> None:
        """Refuse the calls that have waited for a decider up to their deadline."""
        now = self.clock() - (0.0 if self._channel is None else LATE)
        for call in list(self.calls.values()):
            if call.question is not None and now >= call.deadline:
                call.take(refusal_of(call.number, call.question.turn, refusals.no_decider()))

    # -- messages -----------------------------------------------------------------------------------------------

    def _take(self, message: frames.FromDecider) -> None:
        match message:
            case frames.GrantTerms():  # most are
                self._answered(message)
            case frames.Welcome():
                self._welcome(message)
            case frames.PolicyNews():
                self.policy, self.metered = message, frozenset(message.metered)
                self.on_policy(message)
            case frames.FleetNews():
                self.models = {model.name: model for model in message.models}
                self.up = message.up
                self.on_fleet(message)
                self.ready.set()
            case frames.CountsAsk():
                self.send(self.counts())
            case frames.DrainOrder():
                self.on_drain(message)
                if message.decider:
                    self._leave(message.decider)
            case _:
                self._answered(message)

    def _answered(self, message: frames.Judgement | frames.Answer) -> None:
        call = self.calls.get(message.number)
        if call is not None:  # else it has ended, and its decider hears of that
            call.take(message)

    def _welcome(self, welcome: frames.Welcome) -> None:
        assert self._opened is not None  # noqa: S101 # it comes by this channel
        if welcome.version != frames.VERSION:
            self._opened.close(
                f"it speaks version {welcome.version} of the frames, and this relay version {frames.VERSION}"
            )
            return
        if self._token.fences(welcome.epoch):
            self._opened.close(f"its epoch {welcome.epoch} is over: a decider of epoch {self.epoch} was met")
            return
        self._token.raise_to(welcome.epoch)
        self._said = ""
        self._channel = channel = self._opened
        for call in self.calls.values():
            for held in call.held():
                channel.send(held)
        for call in list(self.calls.values()):
            question = call.asked_again()
            if question is not None:
                channel.send(question)
        channel.send(frames.AllHeld(self._number, list(self.calls)))
        channel.send(self.counts())


def _this(channel: Channel) -> Channel:
    """The protocol of a connection that is being made."""
    return channel
