"""Answer of the pipeline to a call of a picker: kept whole instead of sent, with what it means for the proxy."""

from __future__ import annotations

import asyncio
from typing import Self

import msgspec

from gateway.relay.decide.held_calls import HOLD
from gateway.relay.decide.lending import TO_ENGINE
from gateway.relay.inner_client import InnerClient
from gateway.relay.wire.messages import Request

UPSTREAM, HIDE_USAGE = b"x-weir-upstream", b"x-weir-hide-usage"
# Of a grant's own message, or of its framing: not for the client.
_OWN = frozenset({
    HOLD, UPSTREAM, HIDE_USAGE, b"x-weir-first-byte-within", b"x-weir-end-within", b"content-type", b"content-length",
    b"connection",
})  # fmt: skip
_FRAMING = frozenset({b"content-length", b"connection"})


class Answer(msgspec.Struct, frozen=True):
    """Whole answer: a refusal, or a grant."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @classmethod
    def read(cls, written: bytes) -> Self:
        """Read an answer as the pipeline writes it."""
        head, _, body = written.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        headers = [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]
        return cls(int(first.split(b" ")[1]), headers, body)

    def header(self, name: bytes) -> bytes | None:
        """Value of a header; None: there is none."""
        return next((value for each, value in self.headers if each == name), None)

    @property
    def hold(self) -> str | None:
        """Id of the grant's hold; None: the answer is for the client."""
        hold = self.header(HOLD)
        return None if hold is None else hold.decode()

    def for_client(self) -> list[tuple[bytes, bytes]]:
        """Headers of the answer to the client, without those of framing."""
        unwanted = _FRAMING if self.hold is None else _OWN
        return [each for each in self.headers if each[0] not in unwanted and not each[0].startswith(TO_ENGINE)]

    def for_engine(self) -> list[tuple[bytes, bytes]]:
        """Headers that a grant wants the engine to be sent."""
        return [(name.removeprefix(TO_ENGINE), value) for name, value in self.headers if name.startswith(TO_ENGINE)]


class KeptReply:
    """Answer to one call of a picker. `answer` resolves once the answer is whole."""

    def __init__(self, request: Request) -> None:
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._written = bytearray()
        self.client = InnerClient(request, self._written.extend, self._answered, self._abandoned)

    def _answered(self) -> None:
        if not self.answer.done():
            self.answer.set_result(Answer.read(bytes(self._written)))

    def _abandoned(self) -> None:
        """Nothing is broken off here: an answer is sent whole or not at all."""
        raise RuntimeError("an answer to a picker was broken off")
