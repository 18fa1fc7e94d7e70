"""Token usage of whole (not streamed) JSON answers, read sans-IO while the bytes are relayed unchanged.

Only the answer's own `usage` counts, a member of its outermost object. Answers repeat tools and schemas that the
client wrote, and a `usage` in those is the client's text.

An answer of up to BLOCK bytes is kept and parsed at its end, in C. A longer one is scanned once, in blocks: the scanner
follows depth and strings. For a block that lies below the top level it only counts brackets, in C too.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from gateway.core.answer.usage import Usage

BLOCK: Final = 64 * 1024  # bytes
MAX_USAGE: Final = 4096  # bytes of a usage object in an answer longer than BLOCK, its key included
PASSES: Final = 96  # levels that a block may open and close to be counted only; clients may nest 64 deep


class _Answer(msgspec.Struct, gc=False):
    usage: Usage | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_usage = msgspec.json.Decoder(Usage).decode


class JSONUsage:
    """Reads one answer: `feed` its pieces and `finish`, or `whole` at once. Token numbers are None until known.

    It has SSEUsage's interface: `feed` returns its argument, `finish` returns no bytes. `cut`: the answer is JSON that
    lacks its end; a long answer whose usage was read counts as whole.
    """

    __slots__ = ("_depth", "_held", "_in_string", "_over", "cached_tokens", "completion_tokens", "cut", "prompt_tokens")

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self._held = bytearray()  # bytes not scanned yet
        self._depth = 0  # arrays and objects that are open where the held bytes begin
        self._in_string = False  # whether the held bytes begin inside a string
        self._over = False  # whether the usage was read or cannot come, as at the answer's end
        self.cut = False

    def whole(self, answer: bytes) -> None:
        """Read all of an answer. One that is not JSON, or nests deeper than the parser goes, has no usage."""
        try:
            usage = _decode_answer(answer).usage
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.cut = str(error) == _CUT
            return
        if usage is not None:
            self.prompt_tokens, self.completion_tokens, self.cached_tokens = usage.read()

    def feed(self, data: bytes) -> bytes:
        """Take a piece of the answer. At most BLOCK bytes are kept beside the piece itself."""
        if not self._over:
            self._held += data
            if len(self._held) >= BLOCK:
                self._scan()
        return data

    def finish(self) -> bytes:
        """End the answer: read the bytes that were kept."""
        if self._depth and not self._over:
            self._scan()
            self.cut = not self._over
        elif not self._over:
            self.whole(bytes(self._held))
        self._held = bytearray()
        return b""

    def _scan(self) -> None:
        """Scan the held bytes. Keep only what may be the beginning of the usage."""
        held = self._held
        odd = (len(held) - len(held.rstrip(b"\\"))) & 1  # the last backslash escapes a byte that has not arrived
        block = bytes(memoryview(held)[: len(held) - odd])
        self._held = bytearray(b"\\" * odd)
        plain = block.replace(b"\\\\", b"  ").replace(b'\\"', b"  ") if b"\\" in block else block
        if self._depth < 2 or not self._stays_below(plain):
            kept = self._walk(plain)
            self._held[:0] = memoryview(block)[kept:]

    def _stays_below(self, plain: bytes) -> bool:
        """Whether a block that begins below the top level stays below it. If so, its brackets are counted."""
        between = plain.split(b'"')
        brackets = b"".join(between[self._in_string :: 2]).translate(_BRACES, _NOT_BRACKETS)
        for _ in range(PASSES):  # each pass removes the innermost pairs
            size = len(brackets)
            brackets = brackets.replace(b"{}", b"")
            if len(brackets) == size:
                break
        else:
            return False
        closed = brackets.count(b"}")
        if self._depth - closed < 2:
            return False
        self._depth += len(brackets) - 2 * closed
        self._in_string ^= not len(between) & 1
        return True

    def _walk(self, plain: bytes) -> int:
        """Scan a block token by token. Returns the offset from which it must be kept, its length for none.

        The kept rest begins with a string at the top level, so its depth and strings are known.
        """
        size, depth, start = len(plain), self._depth, 0
        if self._in_string:
            start = plain.find(b'"') + 1
            if not start:
                return size
            self._in_string = False
        key = end = size  # the last string at the top level
        inside = False  # whether inside the usage object that follows `key`
        for token in _TOKEN.finditer(plain, start):
            at = token.start()
            first = plain[at]
            if first == _QUOTE:
                if depth == 1:
                    key, end = at, token.end()
                if token.end() == size and (at + 1 == size or plain[-1] != _QUOTE):
                    self._in_string = True
            elif first in b"{[":
                inside = inside or (depth == 1 and _KEY.fullmatch(plain, key, at + 1) is not None)
                depth += 1
            else:
                depth -= 1
                if inside and depth == 1:
                    self._read(plain[end : at + 1])
                    return size
        self._depth = depth
        self._over = depth == 0 and plain.rstrip().endswith((b"}", b"]"))
        if inside:
            self._over = size - key > MAX_USAGE
            kept = not self._over
        else:
            kept = depth == 1 and _KEY_BEGUN.fullmatch(plain, key) is not None
        if not kept:
            return size
        self._depth, self._in_string = 1, False
        return key

    def _read(self, found: bytes) -> None:
        """Read the usage: `found` is a colon and an object."""
        self._over = True
        try:
            numbers = _decode_usage(found[found.index(b"{") :]).read()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        self.prompt_tokens, self.completion_tokens, self.cached_tokens = numbers


_CUT = "Input data was truncated"  # msgspec has no class of its own for it
_QUOTE = ord('"')
_TOKEN = re.compile(rb'"[^"]*"?|[{}\[\]]')
_KEY = re.compile(rb'"usage"[ \t\r\n]{0,16}:[ \t\r\n]{0,16}\{')
_KEY_BEGUN = re.compile(rb'"(?:u|us|usa|usag|usage|usage"[ \t\r\n]{0,16}(?::[ \t\r\n]{0,16})?)?')
_BRACES = bytes.maketrans(b"[]", b"{}")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"{}[]")
