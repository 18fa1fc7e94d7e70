"""Lines of a batch's input file (JSONL): found in slices of the file, and judged one by one.

One bad line fails the batch before any line is sent, as OpenAI's does: whoever made the file made others like it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Raw

from gateway.core.batches.objects import LineFault
from gateway.core.request.routes import ROUTES

FAULTS_TOLD = 100
MAX_LINES = 50_000  # of a batch, as OpenAI has it
LONGEST_ID = 512  # characters of a custom_id
ENDPOINTS = tuple(
    path.decode() for path, route in ROUTES.items()
    if path.startswith(b"/v1/") and not (route.here or route.form or route.counts)
)  # fmt: skip
_BLANKS = b" \t\r\n"
_BLANK_LINES = re.compile(rb"(?:[ \t\r]*\n)+")


class BatchLine(msgspec.Struct, frozen=True):
    """Line that can be sent. `number`: from 1. `offset`, `length`: its place in the file, in bytes."""

    number: int
    custom_id: str
    offset: int
    length: int


class LineFields(msgspec.Struct):
    """The fields of a line."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_ID)]
    method: str
    url: str
    body: Raw


class _BodyFields(msgspec.Struct):
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    stream: bool | None = None


_line = msgspec.json.Decoder(LineFields)
_body = msgspec.json.Decoder(_BodyFields)


def read_line(text: bytes) -> tuple[bytes, str] | None:
    """Return the body of a line that was judged good, and its model; None: it has changed since."""
    try:
        body = _line.decode(text).body
        return bytes(body), _body.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class Judged:
    """Judgement of one file: `feed` it in slices, then `end`. `lines` are the good ones since the last look; `faults`
    the first FAULTS_TOLD of all `bad`. `longest`: bytes of the longest line, `most`: lines at most."""

    def __init__(self, endpoint: str, longest: int, most: int) -> None:
        self.lines: list[BatchLine] = []
        self.faults: list[LineFault] = []
        self.bad = 0
        self.total = 0
        self._endpoint = endpoint
        self._longest = longest
        self._most = most
        self._held = bytearray()
        self._length = 0  # of the line that is held, with what was dropped of one that is too long
        self._offset = 0
        self._number = 0
        self._blank = 0  # lines
        self._seen: set[bytes] = set()

    def feed(self, data: bytes) -> None:
        """Judge the lines that end in this slice."""
        start = self._skip(data, 0)
        while (end := data.find(b"\n", start)) >= 0:
            self._take(data[start : end + 1])
            self._line()
            start = self._skip(data, end + 1)
        self._take(data[start:])

    def end(self) -> None:
        """The file is over; its last line may have no line feed."""
        if self._length:
            self._line()
        if not self.total:
            self._fault("empty_file", "the file has no requests: a line of JSON for each")
        elif self.total > self._most:
            message = f"the file has more than {self._most} requests, the most that a batch takes: make several files"
            self._fault("too_many_requests", message)
        if self._blank > self._most:
            self._fault("too_many_blank_lines", f"the file has more than {self._most} blank lines: take them out")

    @property
    def full(self) -> bool:
        """Whether more requests have come than a batch takes, or as many blank lines: what follows need not be fed."""
        return self.total > self._most or self._blank > self._most

    def taken(self) -> Iterator[BatchLine]:
        """The good lines since the last time."""
        lines, self.lines = self.lines, []
        yield from lines

    def _skip(self, data: bytes, start: int) -> int:
        """Skip the blank lines there, all in one step. Where they end."""
        blank = None if self._length else _BLANK_LINES.match(data, start)
        if blank is None:
            return start
        number = data.count(b"\n", start, blank.end())
        self._blank += number
        self._number += number
        self._offset += blank.end() - start
        return blank.end()

    def _take(self, piece: bytes) -> None:
        self._length += len(piece)
        if self._length <= self._longest + 2:
            self._held += piece
        else:
            self._held.clear()

    def _line(self) -> None:
        text, offset, length = bytes(self._held), self._offset, self._length
        self._offset += length
        self._length = 0
        self._held.clear()
        self._number += 1
        if length > self._longest + 2:
            self.total += 1
            message = f"the line has {length} bytes, and this gateway takes at most {self._longest} of a request"
            self._fault("line_too_long", message, self._number)
        elif text.strip(_BLANKS):
            self.total += 1
            if not self.full:
                self._judge(text, offset, length)
        else:
            self._blank += 1

    def _judge(self, text: bytes, offset: int, length: int) -> None:
        number = self._number
        try:
            text.decode()
            line = _line.decode(text)
        except UnicodeDecodeError:
            self._fault("invalid_json_line", "this line is not UTF-8", number)
            return
        except msgspec.ValidationError as error:
            self._fault("invalid_request", _said(error), number, _param(error))
            return
        except (msgspec.DecodeError, RecursionError):
            self._fault("invalid_json_line", "this line is not parseable as valid JSON, or nested too deep", number)
            return
        key = blake2b(line.custom_id.encode(), digest_size=16).digest()
        if key in self._seen:
            self._fault(
                "duplicate_custom_id", f"the custom_id {line.custom_id[:80]!r} is an earlier line's too: each must be "
                "unique in the file", number, "custom_id",
            )  # fmt: skip
            return
        self._seen.add(key)
        if line.method != "POST":
            self._fault("invalid_method", f"method must be POST, found {line.method[:40]!r}", number, "method")
        elif line.url != self._endpoint:
            message = f"url must be the batch's endpoint {self._endpoint}, found {line.url[:80]!r}"
            self._fault("mismatched_endpoint", message, number, "url")
        else:
            self._judge_body(line, offset, length)

    def _judge_body(self, line: LineFields, offset: int, length: int) -> None:
        try:
            body = _body.decode(line.body)
        except (msgspec.DecodeError, RecursionError) as error:
            self._fault("invalid_request", f"body: {_said(error)}", self._number, "body")
            return
        if body.stream:
            self._fault("invalid_request", "body.stream must be false: a batch has whole answers", self._number, "body")
        elif not self.bad:
            self.lines.append(BatchLine(self._number, line.custom_id, offset, length))

    def _fault(self, code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        self.bad += 1
        self.lines.clear()  # none of them is sent
        if len(self.faults) < FAULTS_TOLD:
            self.faults.append(LineFault(code, message, line, param))


def _said(error: Exception) -> str:
    return str(error).replace("Object missing required field", "it has no field")


def _param(error: msgspec.ValidationError) -> str | None:
    """The field that the message names, if any."""
    said = str(error)
    return next((name for name in LineFields.__struct_fields__ if f"`{name}`" in said or f"$.{name}`" in said), None)
