"""Random events in one turn of the loop: an answer that has begun ends whole, whatever else happens in its turns."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.upstream.client import EngineError
from tests.examples import examples
from tests.stopped_loop import StoppedLoop, stopped
from tests.wire.client_harness import CHUNKED, OK, Peer, Rig, Taken, chunk, run

LONG = 20.0  # seconds, more than any limit on the engine
COUNTED = OK + b"content-length: 40\r\n\r\n"
ANSWERS = [(CHUNKED, b"".join([chunk(b"ten bytes.")] * 4) + b"0\r\n\r\n"), (COUNTED, b"ten bytes." * 4)]
# Put the next piece, let the loop turn, take the engine for dead; stop the process, while the next piece comes: its
# timers ring before it is read, or after.
EVENTS = st.sampled_from(["put", "turn", "abandon", "stop", "late"])


class Exchange:
    """Exchange whose answer the engine puts in pieces."""

    def __init__(self, rig: Rig, peer: Peer, pieces: list[bytes]) -> None:
        self.rig, self.peer, self.pieces = rig, peer, pieces
        self.begun = self.dead = False  # the answer; before that, the engine was taken for dead

    def put(self) -> None:
        if self.pieces and not self.dead:
            self.begun = True
            self.peer.put(self.pieces.pop(0))

    async def meet(self, event: str) -> None:
        if event == "put":
            self.put()
        elif event == "abandon":
            self.dead = self.dead or not self.begun
            self.rig.client.abandon()
        elif event == "turn" or not self.pieces or self.dead:
            await asyncio.sleep(0)
        else:
            stopped(LONG, self.put, reads=event == "late")
            await asyncio.sleep(0)


async def taken(rig: Rig, taken: Taken) -> EngineError | None:
    """Send a request, and take its answer as soon as it begins. Return its error."""
    try:
        reply = await rig.client.send(b"POST", b"/v1/x", b"", b"{}", timeout=10.0)
    except EngineError as error:
        return error
    error_or_none = await taken.of(reply).end()
    reply.close()
    return error_or_none


def cut(data: bytes, places: set[int]) -> list[bytes]:
    ends = sorted(place for place in places if place < len(data))
    return [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]


@settings(max_examples=examples(100), deadline=None)
@given(
    exchanges=st.lists(
        st.tuples(
            st.sampled_from(ANSWERS),
            st.sets(st.integers(5, 70), max_size=4),
            st.lists(EVENTS, max_size=8),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_an_answer_that_has_begun_ends_whole(
    exchanges: list[tuple[tuple[bytes, bytes], set[int], list[str]]],
) -> None:
    async def scenario(rig: Rig) -> None:
        peer: Peer | None = None
        for (head, body), places, events in exchanges:
            got = Taken()
            sending = asyncio.create_task(taken(rig, got))
            peer = peer or await rig.peer()
            await peer.request()
            first, *rest = cut(body, places)
            exchange = Exchange(rig, peer, [head + first, *rest])
            for event in events:
                await exchange.meet(event)
            while exchange.pieces and not exchange.dead:
                exchange.put()
            error = await sending
            if exchange.dead:
                assert error is not None
                assert (error.kind, got.ends) == ("closed", [])
                peer = None
            else:
                assert (error, got.body) == (None, b"ten bytes." * 4)
            if not rig.client.idle:
                peer = None
            assert rig.peers.empty()

    run(scenario, loop=StoppedLoop, stall_timeout=10.0, idle_for=1000.0)
