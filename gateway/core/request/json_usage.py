"""A sans-IO reader of whole (not streamed) JSON answers: the real token usage, while the bytes go on as they came.

Only the `usage` of the answer itself counts, a member of its outermost object. Answers repeat what the client wrote,
its tools and its schema, and whatever stands there under that name is the client's own words.

An answer of up to BLOCK bytes is kept and parsed at its end, in C. A longer one is scanned in blocks, each once: depth
and strings are followed, and a block that lies below the top level is only counted, in C too.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from gateway.core.request.usage import Usage

BLOCK: Final = 64 * 1024  # bytes
MAX_USAGE: Final = 4096  # bytes of a usage object in an answer longer than BLOCK, its key included
PASSES: Final = 96  # levels that one block may open and close, to be only counted; clients may nest 64 deep


class _Answer(msgspec.Struct, gc=False):
    usage: Usage | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_usage = msgspec.json.Decoder(Usage).decode


class JSONUsage:
    """Reads one answer: `feed` its pieces and `finish`, or `whole` at once. The numbers are None until they are known.

    Same shape as SSEUsage: `feed` returns its argument, `finish` nothing.
    """

    __slots__ = ("_depth", "_held", "_in_string", "_over", "cached_tokens", "completion_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self._held = bytearray()  # not looked at yet
        self._depth = 0  # arrays and objects open before what is held
        self._in_string = False  # what is held begins inside a string
        self._over = False  # nothing more is to be learned

    def whole(self, answer: bytes) -> None:
        """Read all of an answer. One that is not JSON, or nests deeper than the parser goes, has told nothing."""
        try:
            usage = _decode_answer(answer).usage
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        if usage is not None:
            self.prompt_tokens, self.completion_tokens, self.cached_tokens = usage.read()

    def feed(self, data: bytes) -> bytes:
        """Take a piece of the answer. At most BLOCK bytes stay, beside the piece itself."""
        if not self._over:
            self._held += data
            if len(self._held) >= BLOCK:
                self._scan()
        return data

    def finish(self) -> bytes:
        """The answer has ended."""
        if self._depth:
            if not self._over:
                self._scan()
        else:
            self.whole(bytes(self._held))
        self._held = bytearray()
        return b""

    def _scan(self) -> None:
        """Look at what is held. Kept of it is only what may be the beginning of the usage."""
        held = self._held
        odd = (len(held) - len(held.rstrip(b"\\"))) & 1  # the last backslash escapes what has not come yet
        block = bytes(memoryview(held)[: len(held) - odd])
        self._held = bytearray(b"\\" * odd)
        plain = block.replace(b"\\\\", b"  ").replace(b'\\"', b"  ") if b"\\" in block else block
        if self._depth < 2 or not self._stays_below(plain):
            kept = self._walk(plain)
            self._held[:0] = memoryview(block)[kept:]

    def _stays_below(self, plain: bytes) -> bool:
        """Whether the top level is out of reach of a block that begins below it; then it is counted."""
        between = plain.split(b'"')
        brackets = b"".join(between[self._in_string :: 2]).translate(_BRACES, _NOT_BRACKETS)
        for _ in range(PASSES):  # every pass removes the innermost pairs
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
        """Follow a block token by token. Returns where its rest begins that must be kept, its length for none.

        What is kept begins with a string at the top level, so that depth and strings are known there.
        """
        size, depth, start = len(plain), self._depth, 0
        if self._in_string:
            start = plain.find(b'"') + 1
            if not start:
                return size
            self._in_string = False
        key = end = size  # the last string at the top level
        inside = False  # a usage object, that of the key
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
        """Learn from the usage, a colon and an object."""
        self._over = True
        try:
            numbers = _decode_usage(found[found.index(b"{") :]).read()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        self.prompt_tokens, self.completion_tokens, self.cached_tokens = numbers


_QUOTE = ord('"')
_TOKEN = re.compile(rb'"[^"]*"?|[{}\[\]]')
_KEY = re.compile(rb'"usage"[ \t\r\n]{0,16}:[ \t\r\n]{0,16}\{')
_KEY_BEGUN = re.compile(rb'"(?:u|us|usa|usag|usage|usage"[ \t\r\n]{0,16}(?::[ \t\r\n]{0,16})?)?')
_BRACES = bytes.maketrans(b"[]", b"{}")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"{}[]")
