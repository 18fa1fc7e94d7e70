"""Answer of the pipeline to a call of a picker, kept whole instead of sent."""

from __future__ import annotations

import asyncio
from typing import Self

import msgspec

from gateway.relay.epp.lending import Headers, headers_of
from gateway.relay.inner_client import InnerClient
from gateway.relay.wire.messages import Request

_FRAMING = frozenset({b"content-length", b"connection"})


class Answer(msgspec.Struct, frozen=True):
    """Whole answer. `headers` are without those of framing."""

    status: int
    headers: Headers
    body: bytes

    @classmethod
    def read(cls, written: bytes) -> Self:
        """Read an answer as the pipeline writes it."""
        head, _, body = written.partition(b"\r\n\r\n")
        first, _, lines = head.partition(b"\r\n")
        headers = [each for each in headers_of(lines) if each[0] not in _FRAMING]
        return cls(int(first.split(b" ")[1]), headers, body)


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
