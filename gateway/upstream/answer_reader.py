"""Strict reader of an engine's answers: bytes in, a head and pieces of body out. No socket, no clock.

llhttp (httptools) reads the answer and refuses malformed ones. This module refuses what llhttp lets through: versions
other than HTTP/1.0 and 1.1, codings other than exactly `chunked`, heads over their limit, and anything after the end of
an answer. The end of an answer takes effect only once the whole read is parsed, because only then is it known what
follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpResponseParser

BodySink: TypeAlias = Callable[[bytes], None]  # takes pieces of a body

# A head after which a new parser is where one is that has read a whole chunk.
_CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n%b\r\n"
_PLAIN = b"HTTP/1.1 2"  # the first bytes of a head that is the answer's own, no interim one
_NONE = cast(HttpResponseParser, None)  # a reader whose parser is not made yet, or gone


def nobody(data: bytes) -> None:
    """Drop a piece of body."""


class AnswerReader:
    """Reader of one answer after another. `max_head`: bytes of a head, and of framing in a row."""

    __slots__ = ("_chunk_over", "_excess", "_framing", "_keep", "_last", "_max_head", "_parser", "_plain", "_tail",
                 "ended", "fault", "framed", "headers", "headers_over", "length", "seen", "sink", "status",
                 "synced")  # fmt: skip

    def __init__(self, max_head: int) -> None:
        self._max_head = max_head
        self._parser = _NONE
        self.sink: BodySink = nobody  # up to the end
        self.begin()

    def begin(self) -> None:
        """Expect the next answer."""
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.length: int | None = None  # bytes of the body as announced
        self.framed = False  # the head says where the body ends, so a cut is seen
        self.fault = ""  # why the answer is refused
        self.seen = self.headers_over = self.ended = False
        self.synced = False  # a read that begins now begins with a chunk's size line
        self._plain = self._excess = self._keep = self._chunk_over = False
        self._framing = 0  # bytes read in a row, up to now, that held nothing of a body
        self._tail = self._last = b""  # the end of what was read, at least 5 bytes; the last piece of body

    @property
    def reusable(self) -> bool:
        """Whether another answer may follow this one, which has ended: its head allows one, and nothing else came."""
        return self._keep and not self._excess

    @property
    def ends_with_connection(self) -> bool:
        """Whether the body, which has begun, ends where the connection does."""
        return self.headers_over and not self.framed

    def feed(self, data: bytes) -> None:
        """Read on; an answer without `fault` goes on, or has `ended`. An error of the sink's is raised as a
        HttpParserCallbackError."""
        if not self.seen:
            self.seen = True
            self._plain = data.startswith(_PLAIN)
        if not self.headers_over:
            room = self._max_head - self._framing
            if len(data) > room:  # whether a head is over its limit must not depend on what came with it
                self._parse(data[:room])
                if not self.headers_over:
                    self._refuse(f"the head of the engine's answer is over {self._max_head} bytes")
                    return
                data = data[room:]
        self._parse(data)
        # A chunk's end was the last thing read, and no begun size line follows it: that would have no line end yet.
        self.synced = self._chunk_over and data[-1:] == b"\n"
        self._tail = data if len(data) > 4 else self._tail[-4:] + data
        if self.ended:
            self._excess = self._excess or not self._ends_here(data)
        elif self._framing > self._max_head:
            self._refuse(f"over {self._max_head} bytes of framing in the engine's answer")

    def shrink(self) -> None:
        """Keep for a stream's minutes only what its end needs: no bytes before those that others pass on, no head that
        was sent on, no parser, since a new one can be made."""
        self._tail = self._last = b""
        self.headers.clear()
        if self._parser is not _NONE:
            self._keep = self._parser.should_keep_alive()
            self._parser = _NONE

    def close(self) -> None:
        """Read no more. The parser and its callbacks are a cycle."""
        self._parser = _NONE
        self.sink = nobody

    def _parse(self, data: bytes) -> None:
        self._framing += len(data)
        parser = self._parser
        if parser is _NONE:
            self._parser = parser = HttpResponseParser(self)
            if self.headers_over:  # see shrink
                parser.feed_data(_CHUNKED % (b"" if self._keep else b"connection: close\r\n"))
        try:
            parser.feed_data(data)
        except HttpParserCallbackError:  # a bug of whoever takes the bytes, not of the engine
            raise
        except (HttpParserError, HttpParserUpgrade) as error:
            if not self.ended:  # else it is what follows the answer, and on_message_begin has seen it
                words = "it changes the protocol" if isinstance(error, HttpParserUpgrade) else error
                self._refuse(f"the engine's answer is not HTTP: {words}")

    def _refuse(self, why: str) -> None:
        self.fault = self.fault or why

    def _ends_here(self, data: bytes) -> bool:
        """Whether no blank lines follow the answer, which llhttp would skip without a word. In doubt: no.

        A counted body ends what was read if the read ends with the body's last piece, unless that piece is itself
        white space. Any other message ends with a blank line: it is the only one if no line end precedes it twice.
        """
        last = self._last
        if self.length and last:
            return data.endswith(last) and not last.isspace()
        tail = self._tail[-5:]
        return len(tail) == 5 and tail[1:] == b"\r\n\r\n" and tail[0] not in b"\r\n"

    # -- httptools' side

    def on_message_begin(self) -> None:
        if self.ended:
            self._excess = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.headers_over:  # trailers, or what follows the end of the answer
            return
        name, headers = name.lower(), self.headers
        if name == b"transfer-encoding" and name in headers:
            value = headers[name] + b", " + value
        headers[name] = value

    def on_headers_complete(self) -> None:
        if self.headers_over:
            return
        parser = self._parser
        status = self.status = parser.get_status_code()
        # Most answers say so with their first bytes; the parser would format a text.
        version = "1.1" if self._plain else parser.get_http_version()
        if version not in ("1.1", "1.0") or not 100 <= status < 600:
            self._refuse(f"the engine's answer is not of HTTP/1.1: status {status}")
            return
        if status < 200:
            return
        self.headers_over = True
        self._framing = 0
        headers = self.headers
        coding, length = headers.get(b"transfer-encoding"), headers.get(b"content-length")
        if coding is not None:
            if coding.lower() != b"chunked" or version == "1.0":
                self._refuse("the engine's answer has a transfer coding other than `chunked` in HTTP/1.1")
                return
            self._chunk_over = True
        elif length is not None:
            self.length = int(length)
        self.framed = coding is not None or length is not None or status in (204, 304)

    def on_chunk_header(self) -> None:
        self._chunk_over = False

    def on_chunk_complete(self) -> None:
        self._chunk_over = True

    def on_body(self, data: bytes) -> None:
        self._framing = 0
        self._last = data
        if not self.ended and not self.fault:
            self.sink(data)

    def on_message_complete(self) -> None:
        if self.status >= 200:
            if not self.ended:
                self._keep = self._parser.should_keep_alive()
                self.ended = True
        else:  # 100 Continue, 103 Early Hints: the answer is still to come
            self.headers = {}
