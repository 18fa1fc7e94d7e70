"""Relays of other machines, as a decider has them: their numbers, their processes, and their clocks.

A machine has a place number of its own. It makes its relays' numbers differ from those of all other machines. Numbers
stand for their processes too, which are none of this machine.
"""

from __future__ import annotations

from gateway.decider.relays.hub import ELSEWHERE, RelayHub
from gateway.decider.relays.session import RelaySession
from gateway.frames.channel import Channel
from gateway.frames.codec import from_relay
from gateway.frames.durations import shift
from gateway.frames.messages import FromRelay, Hello, Message

MOST_RELAYS = 10_000  # of one machine


def relay_number(place: int, relay: int) -> int:
    """The number that a relay of another machine has here."""
    return place * MOST_RELAYS + relay


def process_of(place: int, relay: int) -> int:
    """The number that stands for that relay's process."""
    return ELSEWHERE + relay_number(place, relay)


def relay_of(process: int) -> tuple[int, int]:
    """The place and the relay that such a number stands for."""
    return divmod(process - ELSEWHERE, MOST_RELAYS)


def channel_from(hub: RelayHub, place: int) -> Channel:
    """The protocol of a connection with a relay of another machine."""
    session = RelaySession(hub)

    def take(message: FromRelay) -> None:
        if isinstance(message, Hello):
            if not 0 < message.relay < MOST_RELAYS:
                session.close(f"it is relay {message.relay}, where there are {MOST_RELAYS - 1}")
                return
            message.relay, message.pid = relay_number(place, message.relay), process_of(place, message.relay)
        shift(message, hub.clock())
        session.take(message)

    def outward(message: Message) -> None:
        shift(message, -hub.clock())

    session.channel = Channel(from_relay(), take, session.lost, outward)
    return session.channel
