"""Readers of request bodies that do not arrive with their head: counted, or chunked. No sockets, no clock.

Chunks are decoded strictly: RFC 9112 section 7.1 without optional white space. Every line has a bound, and so has all
that is not body: extensions are dropped, trailers checked and dropped.

Both kinds have `feed(bytes)`, which returns what follows the end of the body and None before it, and `data`.
`PendingBody` gives what they read to the request, or to its sink.
"""

from __future__ import annotations

import re
from typing import Final

from gateway.core.request.body_memory import SMALL, BodyMemory
from gateway.relay.wire.http1 import HeadReader
from gateway.relay.wire.messages import CHUNKED, Request, ServerSettings, WireError, leased

_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t\x20-\x7e\x80-\xff]{0,256})?\r\n")
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")
_CHUNK_LINE_MAX: Final = 16 + 1 + 256 + 2
_CHUNK_SLACK: Final = 16 * 1024
_CHUNKS: Final = 16 * 1024  # in a body however small; beyond, _CHUNK_MEAN bytes of it for each
_CHUNK_MEAN: Final = 64


class CountedBody:
    """A body of announced length, in bytes."""

    __slots__ = ("_missing", "data")

    def __init__(self, length: int) -> None:
        self.data = bytearray()
        self._missing = length

    def feed(self, data: bytes) -> bytes | None:
        """Take bytes as they come."""
        missing = self._missing
        self.data += data[:missing]
        if len(data) >= missing:
            return data[missing:]
        self._missing = missing - len(data)
        return None


class ChunkedBody:
    """Decoder of one chunked body. `data`: the bytes decoded so far."""

    __slots__ = ("_chunks", "_left", "_limit", "_settings", "_slack", "_state", "_tail", "_trailer_bytes",
                 "_trailers", "data")  # fmt: skip

    _SIZE, _DATA, _DATA_END, _TRAILER = range(4)

    def __init__(self, settings: ServerSettings, limit: int) -> None:
        self.data = bytearray()
        self._settings = settings
        self._limit = limit  # bytes
        self._state = self._SIZE
        self._tail = b""  # an unfinished line, never longer than its limit
        self._left = 0
        self._chunks = 0
        self._slack = _CHUNK_SLACK
        self._trailers = 0
        self._trailer_bytes = 0

    def feed(self, data: bytes) -> bytes | None:
        """Take bytes as they come. Raises WireError."""
        if self._tail:
            data = self._tail + data
            self._tail = b""
        at = 0
        while at < len(data):
            if self._state == self._DATA:
                piece = data[at : at + self._left]
                self.data += piece
                at += len(piece)
                self._left -= len(piece)
                if self._left == 0:
                    self._state = self._DATA_END
            elif self._state == self._SIZE:
                after = self._size_line(data, at)
                if after == 0:
                    self._keep(data[at:], _CHUNK_LINE_MAX)
                    return None
                at = after
            elif self._state == self._DATA_END:
                if not b"\r\n".startswith(data[at : at + 2]):
                    raise WireError(400, "chunk is longer than its size")
                if len(data) - at < 2:
                    self._keep(data[at:], 2)
                    return None
                at += 2
                self._state = self._SIZE
            else:
                end = data.find(b"\n", at)
                if end < 0:
                    self._keep(data[at:], self._settings.max_headers - self._trailer_bytes)
                    return None
                line = data[at : end + 1]
                at = end + 1
                if line == b"\r\n":
                    return data[at:]
                self._trailer_line(line)
        return None

    def _keep(self, data: bytes, limit: int) -> None:
        if len(data) > limit:
            raise WireError(400, "chunk or trailer line is too long")
        self._tail = data

    def _size_line(self, data: bytes, at: int) -> int:
        """Position after the size line at `at`; 0 if the line is not complete."""
        line = _CHUNK_LINE.match(data, at)
        if line is None:
            if data.find(b"\n", at, at + _CHUNK_LINE_MAX) >= 0:
                raise WireError(400, "chunk size is malformed")
            return 0
        self._left = int(line[1], 16)
        after = line.end()
        if len(self.data) + self._left > self._limit:
            raise WireError(413, f"body is over the limit of {self._limit} bytes")
        self._chunks += 1
        if self._chunks > _CHUNKS + len(self.data) // _CHUNK_MEAN:
            raise WireError(400, f"the body comes in chunks of less than {_CHUNK_MEAN} bytes")
        # Each chunk may carry a size line in proportion; beyond that, framing draws on one allowance per body.
        self._slack -= max(0, after - at - 16 - self._left)
        if self._slack < 0:
            raise WireError(400, "chunk extensions are too large")
        self._state = self._DATA if self._left else self._TRAILER
        return after

    def _trailer_line(self, line: bytes) -> None:
        self._trailers += 1
        self._trailer_bytes += len(line)
        settings = self._settings
        if self._trailer_bytes > settings.max_headers or self._trailers > settings.max_header_fields:
            raise WireError(400, "trailers are too large")
        if line[-2:] != b"\r\n" or _TRAILER.fullmatch(line, 0, len(line) - 2) is None:
            raise WireError(400, "trailer is malformed")


class PendingBody:
    """Body of a request that did not come with its head. `by`: loop time after which the body is of no use. What is
    held of the body counts on the request."""

    __slots__ = ("_bodies", "_decoder", "_head", "by", "request")

    def __init__(
        self, request: Request, head: HeadReader, settings: ServerSettings, bodies: BodyMemory, by: float
    ) -> None:
        self._bodies = bodies
        self._head = head
        self.request = request
        self.by = by
        self._decoder: ChunkedBody | CountedBody = CountedBody(request.length)
        if request.length == CHUNKED:
            limit = request.limit if request.sink is not None else min(request.limit, settings.max_body)
            self._decoder = ChunkedBody(settings, limit)

    def feed(self, data: bytes) -> bytes | None:
        """Take bytes as they come. Returns what follows, once the request has its whole body. Raises WireError."""
        request, body = self.request, self._decoder
        counted = request.length != CHUNKED
        rest = body.feed(data)
        if request.sink is not None:
            piece = bytes(body.data)
            body.data.clear()
            if counted:
                self._head.skip(piece)
            request.sink.feed(piece)
        elif len(body.data) > SMALL:
            request.held = leased(request.held, self._bodies, request.owner or request.peer, len(body.data))
        if rest is not None:
            request.body = bytes(body.data)
            if counted and request.sink is None:
                self._head.skip(request.body)
        return rest
